"""Overflow actors on a real server: rows above a backlog, and every row while the role has no other actor."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.permissions import NODE
from broker.pull import PullSubscription
from broker.streams import ensure_consumer, find_consumer, pool_spec
from broker.table import Table
from relax_actors.messages import Prompt
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime import Context, Role, Row
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.overflow import has_regular
from relax_actors.runtime.pool_pump import PoolPump
from tests.support.contexts import MakeContext, create_consumer
from tests.support.pumps import pool_pump
from tests.support.running import wait_until

POOL = "counts"
READY = {"phase": "ready"}


class Counts(Role):
    """Counts the tokens of prompts, one row at a time."""

    reads = ("prompt",)
    writes = "count"
    spec = RoleSpec(may_be_spot=True)

    def handle(self, row: Row) -> int:
        return len(row.prompt.tokens)


def admit(table: Table, count: int, step: int = 0) -> None:
    """Write the prompts of a step."""
    prompt = Prompt("1>", np.array([1], np.int32), "", {}, seed=0, min_version=0)
    subjects = (f"{table.subjects.prefix}.group.{step}.{index}.prompt" for index in range(count))
    table.put_all((subject, prompt) for subject in subjects)


def make_pool(table: Table, *, overflows: bool) -> None:
    spec = pool_spec(POOL, [table.subjects.column("prompt")], 3600.0, 100, overflows=overflows)
    table.connection.call(ensure_consumer(table.connection, table.subjects.table_stream, spec), 20)


async def take(table: Table, backlog: int | None, most: int, seconds: float) -> list[Any]:
    """Pull up to `most` messages until none arrives for some seconds."""
    stream = table.subjects.table_stream
    pull = PullSubscription(
        table.connection, stream, POOL, most, backlog=None if backlog is None else lambda: backlog, prefetch=False
    )
    await pull.start()
    taken: list[Any] = []
    while len(taken) < most and (more := await pull.fetch(most - len(taken), seconds)):
        taken += more
    await pull.close()
    return taken


def test_rows_below_the_backlog_wait_for_other_actors(table: Table) -> None:
    make_pool(table, overflows=True)
    admit(table, 3)
    spot = table.connection.call(take(table, 4, 8, 0.5), 20)
    assert spot == []
    admit(table, 3, step=1)
    spot = table.connection.call(take(table, 4, 8, 0.5), 20)
    assert len(spot) == 3, "of six rows those above a backlog of three are taken"
    regular = table.connection.call(take(table, 0, 8, 0.5), 20)
    assert len(regular) == 3


def test_request_that_waits_is_answered_when_the_backlog_is_reached(table: Table) -> None:
    make_pool(table, overflows=True)

    async def both() -> list[Any]:
        taking = asyncio.create_task(take(table, 4, 1, 20.0))
        stream = table.subjects.table_stream
        while not (info := await find_consumer(table.connection, stream, POOL)) or not info.num_waiting:
            pass
        await asyncio.to_thread(admit, table, 5)
        return await taking

    assert len(table.connection.call(both(), 30)) == 1


def test_consumer_of_a_run_without_overflow_is_updated_in_place(table: Table) -> None:
    make_pool(table, overflows=False)
    admit(table, 6)
    held = table.connection.call(take(table, None, 1, 5.0), 20)
    make_pool(table, overflows=True)
    assert len(table.connection.call(take(table, 4, 8, 0.5), 20)) == 2

    async def acknowledge() -> int:
        await held[0].ack_sync(timeout=5)
        info = await find_consumer(table.connection, table.subjects.table_stream, POOL)
        assert info is not None
        return info.num_ack_pending or 0

    assert table.connection.call(acknowledge(), 20) == 2, "a row in hand from before the update is acknowledged"
    make_pool(table, overflows=False)
    assert len(table.connection.call(take(table, None, 8, 0.5), 20)) == 3, "and the consumer can be updated back"


@contextmanager
def pumping(context: Context, folder: Path, backlog: int) -> Iterator[PoolPump]:
    """The pump of an actor on a node marked as spot; it pumps until the end."""
    role = Counts()
    role.context = context
    context.backlog = backlog
    create_consumer(context, role)
    stopping = asyncio.Event()
    loop, failed = context.table.connection.loop, []
    with pool_pump(role, BlackBox(folder / "counts.box"), failed) as pump:
        running = asyncio.run_coroutine_threadsafe(pump.run(stopping), loop)
        try:
            yield pump
        finally:
            loop.call_soon_threadsafe(stopping.set)
            loop.call_soon_threadsafe(pump.wake)
            running.result(20)
    assert failed == []


def renew(context: Context, *actors: str, spot: bool) -> None:
    """Renew the lease of node 1."""
    entry = {"name": "there", "where": "x", "children": dict.fromkeys(actors, READY), "spot": spot}
    context.table.connection.call(context.state.renew_lease(NODE, 1, entry, 600), 10)


@pytest.mark.parametrize("spot", [False, True], ids=["regular", "spot"])
def test_spot_actor_leaves_the_last_rows_to_the_regular_ones_if_there_are_any(
    make_context: MakeContext, tmp_path: Path, *, spot: bool
) -> None:
    context = make_context(POOL)
    renew(context, f"{POOL}.1000", spot=spot)
    with pumping(context, tmp_path, backlog=5) as pump:
        admit(context.table, 6)
        wait_until(lambda: pump.handled == (2 if not spot else 6), "rows above the backlog, or all of them")
        if not spot:
            renew(context, spot=True)  # the node of the regular actor is gone
            wait_until(lambda: pump.handled == 6, "the rows that waited for it")


def test_only_ready_actors_of_the_role_on_nodes_without_spot_count() -> None:
    assert has_regular({"node.0": {"children": {"rollout.0": READY}}}, "rollout")
    assert not has_regular({"node.0": {"children": {"rollout.0": {"phase": "starting"}}}}, "rollout")
    assert not has_regular({"node.0": {"children": {"reward.0": READY}}}, "rollout")
    assert not has_regular({"node.1": {"spot": True, "children": {"rollout.1000": READY}}}, "rollout")
    assert not has_regular({"node.1": {"children": [READY]}, "node.2": {"children": {"rollout.1": 7}}}, "rollout")
