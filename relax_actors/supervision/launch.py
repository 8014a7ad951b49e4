"""What the interpreter of supervisors needs to know of a child's process, and whom it tells of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from relax_actors.errors import RelaxError
from relax_actors.runtime.blackbox import Snapshot
from relax_actors.supervision.outcome import Verdict
from relax_actors.supervision.spec import Exit
from relax_actors.supervision.supervisor import GiveUp


class Process(Protocol):
    """What is needed of a process, however it was started."""

    @property
    def pid(self) -> int:
        """Its id, and that of its group."""

    @property
    def returncode(self) -> int | None:
        """How it ended, once that was waited for."""

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it is not known."""

    def wait(self) -> int:
        """Wait until it has ended; gives the exit code."""


class StartError(RelaxError):
    """A child could not be started. Failures of one `cause` count once against the restart intensity."""

    def __init__(self, text: str, cause: str = "") -> None:
        super().__init__(text)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Launch:
    """How a child is started: the command, where its output goes, and its black box if it has one.

    A child that cannot say by the pipe that it is ready has a `probe`, which is asked again and again. One that has no
    black box may have an `examine`, asked once a second while it is ready: a verdict means that it must be killed.
    """

    command: list[str]
    log: Path
    box: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    probe: Callable[[], bool] | None = None
    health_check: Callable[[], Verdict | None] | None = None
    fork: Callable[[int, int], Process] | None = None
    """Starts it instead of `command`, given descriptors for its output and its status pipe."""
    can_start: Callable[[], bool] | None = None
    """Asked again and again before the start: whether it can be started now."""


class Observer(Protocol):
    """Told of everything that happens to children, in the interpreter's thread."""

    def started(self, child: str, pid: int, starts: int) -> None:
        """A process was started, for the `starts`-th time."""

    def ready(self, child: str, seconds: float) -> None:
        """A child became ready, `seconds` after its start."""

    def ended(self, child: str, outcome: Exit, last: Snapshot) -> None:
        """A process is gone; `last` is what its black box holds."""

    def gave_up(self, pool: str, report: GiveUp) -> None:
        """A supervisor gave up."""
