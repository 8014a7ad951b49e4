"""Context of an actor: configuration, table, journal, and callbacks into its process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from broker.store import raise_error
from relax_actors.errors import FencedError, StoreFullError
from relax_actors.runtime.run_folder import RunFolder

if TYPE_CHECKING:  # `relax check` loads every role, and needs no NATS
    from broker.leases import RunState
    from broker.table import Table
    from relax_actors.config import Config
    from relax_actors.runtime.journal import Journal


@dataclass
class Context:
    """Everything an actor may use besides its rows; set as `Role.context` before `Role.setup`.

    Attributes:
        config: the run's configuration.
        folder: the run's folder.
        role: name of the role.
        n: number of the actor within its role.
        incarnation: how often an actor of this name has been started, this start included; signs every cell.
        table: the run's table.
        state: the run's leases and counters.
        journal: publishes events and metrics.
        stopping: whether the actor was asked to stop.
        progress: report progress, so that the watchdog does not take the actor for hung.
        report_waiting: report what the actor waits for, also while it handles rows, for `relax tree` and the black box.
        wait_for_room: called when the disk is full; waits a while, or raises the error.
        wake: make the pump call `Role.serve`, now or when the current rows are done; thread-safe.
        fail: end the process as crashed, with an error as the reason; thread-safe.
        node_folder: folder of the actor's node, which is the run's folder on the node of `relax up`.
        device_lock: context manager in which the actor may compute. Where roles share a device, entering it waits
            until no other actor holds the device.
        yields_device: whether the actor must take no further work in, because another actor's turn on the device is
            due; thread-safe.
        has_work: whether rows or cells wait for the actor, which keeps a shared device meanwhile; set by the pump,
            thread-safe.
        backlog: rows that must wait for the role before this actor gets any, where its node is marked as spot; else 0.
        on_trial: whether an operation judges the actor's code: until its first row succeeds, a failure ends the process
            and blames no row.
        shares_memory: have an engine, or another object with the methods of `ReleasesMemory`, leave the device while
            other actors compute there.
    """

    config: Config
    folder: RunFolder
    role: str
    n: int
    incarnation: int
    table: Table
    state: RunState
    journal: Journal
    stopping: Callable[[], bool] = field(default=lambda: False)
    progress: Callable[[], None] = field(default=lambda: None)
    report_waiting: Callable[[str], None] = field(default=lambda _: None)
    wait_for_room: Callable[[StoreFullError], None] = raise_error
    wake: Callable[[], None] = field(default=lambda: None)
    fail: Callable[[BaseException], None] = raise_error
    node_folder: Path = Path()
    device_lock: Callable[[], AbstractContextManager[None]] = nullcontext
    shares_memory: Callable[[object], None] = field(default=lambda _: None)
    yields_device: Callable[[], bool] = field(default=lambda: False)
    has_work: Callable[[], bool] = field(default=lambda: False)
    backlog: int = 0
    on_trial: bool = False

    @property
    def shares_device(self) -> bool:
        """Whether other roles compute on the actor's device."""
        return self.device_lock is not nullcontext

    def continue_turn(self, turn: ExitStack) -> None:
        """Hold the device until `turn` is closed; give it up before that if another actor's turn is due."""
        if self.yields_device():
            turn.close()
        turn.enter_context(self.device_lock())

    @property
    def author(self) -> str:
        """Signature of this incarnation in its cells: `<role>.<n>#<incarnation>`."""
        return f"{self.role}.{self.n}#{self.incarnation}"

    async def raise_if_fenced_async(self) -> None:
        """Check that no later incarnation of this actor has started.

        An actor that is stopped by a signal is taken for dead and replaced; it must not act when it resumes.

        Raises:
            FencedError: a later incarnation has started.
        """
        newest = await self.state.incarnations(self.role, self.n)
        if newest > self.incarnation:
            msg = (
                f"incarnation {newest} of {self.role}.{self.n} has started; this is incarnation {self.incarnation}, "
                "which exits"
            )
            raise FencedError(msg)

    def raise_if_fenced(self) -> None:
        """Call `raise_if_fenced_async` from the role's thread."""
        self.table.call(self.raise_if_fenced_async())
