"""Interface between the process tree and its children: how to start a child, and who observes it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from relax_actors.errors import RelaxError
from relax_actors.runtime.blackbox import Snapshot
from relax_actors.supervision.outcome import Verdict
from relax_actors.supervision.spec import Exit
from relax_actors.supervision.supervisor import GiveUp


class Process(Protocol):
    """A process, started or forked."""

    @property
    def pid(self) -> int:
        """Id of the process and of its group."""

    @property
    def returncode(self) -> int | None:
        """Exit code, once it has been collected."""

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""

    def wait(self) -> int:
        """Wait for the end of the process; return the exit code."""


class StartError(RelaxError):
    """A child could not be started. Failures of the same `cause` count once against the restart intensity."""

    def __init__(self, text: str, cause: str = "") -> None:
        super().__init__(text)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start and check a child.

    Attributes:
        command: program and arguments.
        log: file for its output.
        box: its black box, if it has one.
        environment: variables added to the supervisor's environment.
        secrets: names of the secrets in the supervisor's environment that the child gets; no others.
        probe: for a child without a status pipe: polled during the start until the child is ready.
        health_check: for a child without a black box: called once a second, with its process, while it is ready; a
            verdict kills it.
        fork: starts the process in place of `command`, given descriptors for its output and its status pipe.
        can_start: polled before the start, until the child can be started.
        awaits: child whose readiness this one waits for while it starts; empty if none.
        hold_stop: start `command` with SIGTERM blocked until it has a handler, since it has work to finish.
    """

    command: list[str]
    log: Path
    box: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    secrets: Collection[str] = ()
    probe: Callable[[], bool] | None = None
    health_check: Callable[[int], Verdict | None] | None = None
    fork: Callable[[int, int], Process] | None = None
    can_start: Callable[[], bool] | None = None
    awaits: str = ""
    hold_stop: bool = False


class Observer(Protocol):
    """Observer of the children's events; called in the process tree's thread."""

    def started(self, child: str, pid: int, starts: int) -> None:
        """Handle the `starts`-th start of a child's process."""

    def ready(self, child: str, seconds: float) -> None:
        """Handle a child that became ready, `seconds` after its start."""

    def ended(self, child: str, outcome: Exit, last: Snapshot) -> None:
        """Handle the end of a child's process; `last` is the content of its black box."""

    def gave_up(self, pool: str, report: GiveUp) -> None:
        """Handle a supervisor that gave up."""
