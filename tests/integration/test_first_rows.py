"""Pools whose rows all fail, on a real server: training rows and held-out rows are judged apart in every role."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.subjects import RowId
from broker.table import Table
from relax_actors.config import Config
from relax_actors.errors import AllRowsFailedError
from relax_actors.messages import Prompt
from relax_actors.registry.catalog import ROLES
from relax_actors.roles.agent_rollout import AgentRollout
from relax_actors.roles.turn_rollout import TurnRollout
from relax_actors.runtime import Drop, More, Results, Role, Row, StatefulRole, check_role
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.service_role import ServiceRole
from tests.support.contexts import MakeContext, create_consumer
from tests.support.messages import assert_says
from tests.support.pumps import pool_pump
from tests.support.running import wait_until


class Custom(Role):
    """A user's role that handles held-out rows, too."""

    writes = "custom"
    kinds = ("group", "eval")


BUILT_IN = [check_role(ROLES.load(name, "role"), name) for name in ROLES.built_in]
POOLS = [cls for cls in BUILT_IN if not issubclass(cls, StatefulRole | ServiceRole)]
CLASSES = [cls for cls in (*POOLS, TurnRollout, AgentRollout, Custom) if "group" in cls.kinds]
BOTH = [cls for cls in CLASSES if "eval" in cls.kinds]
ROWS = 8


def fail() -> None:
    msg = "on purpose"
    raise ValueError(msg)


def failing(cls: type[Role], kind: str) -> Role:
    """Return an instance of a role in whose hands all rows of a kind fail."""

    class Fails(cls):  # type: ignore[misc, valid-type]
        def inputs(self, config: Config) -> tuple[str, ...]:
            del config
            return ("prompt",)

        def row_limit(self) -> int:
            return ROWS

        def stream(self, rows: Sequence[Row], more: More) -> Iterator[Results]:
            del more
            if any(row.id.kind == kind for row in rows):
                fail()
            yield [(row, Drop("handled")) for row in rows]

    role: Role = Fails.__new__(Fails)
    return role


@pytest.fixture
def run_pool(table: Table, make_context: MakeContext, tmp_path: Path) -> Callable[..., list[BaseException]]:
    """Return a function that runs a role on rows of the kinds given, one kind after the other."""

    def run(role: Role, *kinds: str) -> list[BaseException]:
        role.context = make_context("pool", "supervision.max_failures=1")
        role.context.stopping = (stopping := asyncio.Event()).is_set
        create_consumer(role.context, role)
        failed: list[Any] = []
        with pool_pump(role, BlackBox(tmp_path / "pool.box"), failed) as pump:
            running = table.connection.submit(pump.run(stopping))
            for kind in kinds:
                for index in range(ROWS):
                    prompt = Prompt("1>", np.zeros(0, np.int32), "", {}, seed=0, min_version=0)
                    table.put(table.subject(RowId(0, index, kind), "prompt"), prompt)
                ends = [table.subjects.column(name, kind) for name in ("dropped", "quarantined")]
                wait_until(lambda ends=ends: sum(map(table.count_cells, ends)) == ROWS, f"end of all rows {kind}")
            table.connection.loop.call_soon_threadsafe(stopping.set)
            table.connection.loop.call_soon_threadsafe(pump.wake)
            running.result(20)
            return list(failed)  # without the error of closing a role that was never set up

    return run


@pytest.mark.parametrize("cls", CLASSES)
def test_training_rows_that_all_fail_stop_the_run_although_held_out_rows_succeed(
    run_pool: Callable[..., list[BaseException]], cls: type[Role]
) -> None:
    kinds = ("eval", "group") if "eval" in cls.kinds else ("group",)
    (stop,) = run_pool(failing(cls, "group"), *kinds)
    assert isinstance(stop, AllRowsFailedError)
    assert_says(stop, f"the first {ROWS} rows of role pool", "same error")
    assert "ValueError: on purpose, in fail (" in str(stop)


@pytest.mark.parametrize("cls", BOTH)
def test_held_out_rows_that_all_fail_stop_the_run_although_training_rows_succeed(
    run_pool: Callable[..., list[BaseException]], cls: type[Role]
) -> None:
    (stop,) = run_pool(failing(cls, "eval"), "group", "eval")
    assert isinstance(stop, AllRowsFailedError)
    assert_says(stop, f"the first {ROWS} held-out rows of role pool", "same error")


@pytest.mark.parametrize("kind", ["group", "eval"])
def test_rows_of_a_kind_that_another_actor_has_handled_meanwhile_keep_the_run_up(
    run_pool: Callable[..., list[BaseException]], table: Table, kind: str
) -> None:
    role = failing(Custom, kind)
    stream = role.stream

    def stream_beside_another(rows: Sequence[Row], more: More) -> Iterator[Results]:
        subject = table.subject(RowId(1, table.count_cells(table.subjects.column("custom", kind)), kind), "custom")
        table.put_encoded([(subject, table.encode(subject, 1))])
        return stream(rows, more)

    role.stream = stream_beside_another  # type: ignore[method-assign]
    assert run_pool(role, kind) == []
