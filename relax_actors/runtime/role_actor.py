"""Actor of a role: the thread in which it works, and the messages of its pump."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

from broker.subjects import CellId
from broker.table import Cell
from relax_actors.runtime.actor import Actor
from relax_actors.runtime.handler import Handler, Job
from relax_actors.runtime.role import Role
from relax_actors.runtime.stateful_role import StatefulRole
from relax_actors.runtime.watchdog import Watchdog

SERVE_SECONDS = 1.0
"""Time after which an actor that shares its device takes no further request that belongs to no row."""


class RowSource(Protocol):
    """Pump of a pool, as the role's thread sees it."""

    @property
    def has_rows(self) -> bool:
        """Whether rows wait that were fetched."""

    def take_more(self, most: int) -> list[Job]:
        """Take up to `most` rows that arrived meanwhile, without waiting."""

    def report_finished(self, jobs: list[Job]) -> None:
        """Write the results of finished jobs while others are handled."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Prepare the role; the first message."""


@dataclass(frozen=True, slots=True)
class HandleRows:
    """Handle rows, and further ones of their source; answers with unreported jobs."""

    jobs: list[Job]
    source: RowSource


@dataclass(frozen=True, slots=True)
class Serve:
    """Do work that belongs to no row, until rows wait at the source."""

    source: RowSource


@dataclass(frozen=True, slots=True)
class Recover:
    """Rebuild the state of a stateful role from all cells that existed when the actor started."""

    cells: list[tuple[CellId, Cell]]


@dataclass(frozen=True, slots=True)
class TakeCells:
    """Process new cells of a stateful role."""

    cells: list[tuple[CellId, Cell]]


@dataclass(frozen=True, slots=True)
class Idle:
    """Do background work of a stateful role."""


Message: TypeAlias = Setup | HandleRows | Serve | Recover | TakeCells | Idle


class RoleActor(Actor):
    """Runs a role, one message at a time: `Setup` is the first, and `stop` closes the role."""

    name = "role"

    def __init__(self, role: Role, watch: Watchdog) -> None:
        super().__init__(role.context)
        self._role, self._watch = role, watch
        self._handler = Handler(role, role.context)

    def on_start(self) -> None:
        """Tell the watchdog which thread is the role's."""
        super().on_start()
        self._watch.thread_id = threading.get_ident()

    def on_receive(self, message: Message) -> Any:
        """Have the role do what a message says."""
        match message:
            case Setup():
                return self._role.setup()
            case HandleRows(jobs, source):
                return self._handler.run(jobs, source.take_more, source.report_finished)
            case Serve(source):
                return self._serve(source)
            case Recover(cells):
                return self._stateful.recover(cells)
            case TakeCells(cells):
                return self._stateful.on_cells(cells)
            case Idle():
                return self._stateful.idle()

    def on_stop(self) -> None:
        """Close the role; an error ends the process as crashed."""
        try:
            self._role.close()
        except BaseException as error:  # noqa: BLE001 pykka would only log it
            self.context.fail(error)

    @property
    def _stateful(self) -> StatefulRole:
        return cast("StatefulRole", self._role)

    def _serve(self, source: RowSource) -> None:
        context = self.context
        with context.device_lock():
            end = time.monotonic() + (SERVE_SECONDS if context.shares_device else float("inf"))
            self._role.serve(lambda: source.has_rows or context.stopping() or time.monotonic() > end)
