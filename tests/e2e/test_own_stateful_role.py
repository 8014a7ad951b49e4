"""A user's stateful role on a node of its own, with credentials that let it write its cells and no others."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from broker.connection import Connection
from broker.store import Store
from broker.subjects import Subjects
from broker.table import Table
from tests.support.faults import command_of
from tests.support.guarded import Guarded, MakeGuarded
from tests.support.messages import assert_says
from tests.support.nodes import Node
from tests.support.running import Run, processes_of, wait_until

NAME = "audited"
AUDITOR = "roles.auditor.actor=tiny_stateful.Auditor"
HERE = "prompts,rollout,reward,advantages,trainer"


@pytest.fixture
def audited(make_guarded: MakeGuarded, make_run: Callable[..., Run]) -> tuple[Guarded, Run]:
    """A guarded broker, and a run with the role that is not up yet."""
    guarded = make_guarded([f"run.name={NAME}", AUDITOR])
    guarded.make()
    guarded.start()
    broker = [f"broker.url=nats://127.0.0.1:{guarded.port}", f"broker.credentials={guarded.keys}"]
    return guarded, make_run(NAME, AUDITOR, *broker)


def auditor_process(node: Node) -> int | None:
    return next((pid for pid in processes_of(node.work, "actor_process") if "auditor" in command_of(pid)), None)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_it_writes_its_cells_before_and_after_a_kill(
    audited: tuple[Guarded, Run],
    nodes: Callable[..., Node],
) -> None:
    guarded, run = audited
    own = run.cwd / "own-keys"
    shutil.copytree(guarded.keys / "node", own / "node")
    (guarded.keys / "auditor").rename(own / "auditor")
    run.start("run.steps=100000", "--roles", HERE)
    wait_until(run.folder.address.exists, "broker.json")
    node = nodes(Guarded(own, guarded.port, []), run, "audit", "auditor")
    with closing(Connection(guarded.address("operator"), "test")) as connection:
        table = Table(connection, Subjects(NAME), Store(run.folder.root / "store"), "test")

        def writers() -> set[Any]:
            cells = (table.get(subject) for subject in table.list_subjects(table.subjects.column("audited")))
            return {table.read_envelope(cell.data).author for cell in cells if cell is not None}

        wait_until(lambda: "auditor.0#1" in writers(), "cells of the first incarnation", 120)
        victim = wait_until(lambda: auditor_process(node), "its process")
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: "auditor.0#2" in writers(), "cells of the second incarnation", 60)
        assert table.list_cells(table.subjects.numbered("audit", "*"))
    run.end_in_order()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_rejected_write_names_the_permission(audited: tuple[Guarded, Run]) -> None:
    guarded, run = audited
    code, _, said = run.start("run.steps=100000", "roles.auditor.column=Secret", "supervision.intensity=0").finish()
    assert code == 1, said
    assert_says(
        said,
        f"broker nats://127.0.0.1:{guarded.port}",
        f"relax.{NAME}.group.0.0.Secret",
        f"user '{NAME}.auditor'",
        "`writes`",
        "`spec`",
        "relax keys",
    )
