"""Pump of a stateful actor on a real server: the history, new cells, background work, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.subjects import CellId, RowId, Subjects
from broker.table import Cell
from relax_actors.config import Config
from relax_actors.messages import Prompt
from relax_actors.runtime import Context, StatefulRole
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.follower_pump import FollowerPump
from tests.support.contexts import MakeContext, create_consumer
from tests.support.pumps import started
from tests.support.running import wait_until


class Records(StatefulRole):
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.error: BaseException | None = None

    @classmethod
    def follows(cls, config: Config) -> list[str]:
        return [Subjects(config.run.name).column("prompt")]

    def recover(self, cells: list[tuple[CellId, Cell]]) -> None:
        self.calls.append(("recover", [cell_id.index for cell_id, _ in cells]))

    def on_cells(self, cells: list[tuple[CellId, Cell]]) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(("on_cells", [cell_id.index for cell_id, _ in cells]))

    def idle(self) -> None:
        self.calls.append(("idle", []))

    def close(self) -> None:
        self.calls.append(("close", []))


@pytest.fixture
def role(make_context: MakeContext) -> Records:
    role = Records()
    role.context = make_context("records")
    create_consumer(role.context, role)
    return role


class Running:
    """A pump at work."""

    def __init__(self, pump: FollowerPump, context: Context) -> None:
        self._stopping, self._pump, self._loop = asyncio.Event(), pump, context.table.connection.loop
        context.stopping = self._stopping.is_set
        self.end = context.table.connection.submit(pump.run(self._stopping))

    def stop(self) -> int:
        """Return the number of cells handled after the history."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._loop.call_soon_threadsafe(self._pump.wake)
        self.end.result(20)
        return self._pump.handled


@pytest.fixture
def run(role: Records, tmp_path: Path) -> Iterator[Callable[[], Running]]:
    failed: list[Any] = []
    with started(FollowerPump, role, BlackBox(tmp_path / "records.box"), failed) as pump:
        yield lambda: Running(pump, role.context)
    assert role.calls[-1] == ("close", [])
    assert failed == []


def admit(context: Context, *indices: int) -> None:
    prompt = Prompt("1>", np.zeros(0, np.int32), "", {}, seed=0, min_version=0)
    for index in indices:
        context.table.put(context.table.subject(RowId(0, index), "prompt"), prompt)


def test_history_comes_at_once_before_new_cells_and_background_work(role: Records, run: Callable[[], Running]) -> None:
    admit(role.context, 3, 1, 2)
    running = run()
    wait_until(lambda: ("idle", []) in role.calls, "background work")
    admit(role.context, 5)
    wait_until(lambda: ("on_cells", [5]) in role.calls, "the new cell")
    assert running.stop() == 1
    assert [call for call in role.calls if call[0] != "idle"] == [("recover", [3, 1, 2]), ("on_cells", [5])]


def test_empty_history_is_a_history(role: Records, run: Callable[[], Running]) -> None:
    running = run()
    wait_until(lambda: len(role.calls) > 1, "background work")
    assert running.stop() == 0
    assert role.calls[:2] == [("recover", []), ("idle", [])]


@pytest.mark.parametrize("error", [ValueError("on purpose"), SystemExit("on purpose")])
def test_error_of_the_role_ends_the_pump(role: Records, run: Callable[[], Running], error: BaseException) -> None:
    running, role.error = run(), error
    wait_until(lambda: role.calls, "the history")
    admit(role.context, 7)
    with pytest.raises(Exception, match="on purpose"):
        running.end.result(20)
