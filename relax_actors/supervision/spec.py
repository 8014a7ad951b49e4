"""Supervision as data: child specs, restart limits and outcomes, in OTP's terms."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from enum import StrEnum

RETURN_ROWS = signal.SIGUSR1
"""Signal that has an actor return the rows in its hands to their pool, and end."""

ON_TRIAL = "RELAX_ON_TRIAL"
"""Environment variable of an actor whose code an operation judges."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child of a supervisor.

    Attributes:
        id: its id, `<role>.<n>` for an actor.
        shutdown: seconds to stop in.
        start_deadline: seconds to become ready in.
        drain: seconds to finish its current rows and stop in, when its pool shrinks; `shutdown` if None.
        returns_rows: whether it gets the signal `RETURN_ROWS` shortly before this time is over.
        on_probation: whether it is restarted however often it fails, because an operation judges its failures.
    """

    id: str
    shutdown: float = 5.0
    start_deadline: float = 180.0
    drain: float | None = None
    returns_rows: bool = False
    on_probation: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Restart intensity: at most `intensity` failures within `period` seconds; one more ends the pool."""

    intensity: int
    period: float


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delay before a restart: `base * 2**n` seconds up to `most`, times a random factor of 0.5 to 1."""

    base: float
    most: float

    def delay(self, failures: int, source: random.Random) -> float:
        """Return the delay in seconds after the `failures`-th consecutive failure, counted from 1."""
        full = min(self.most, self.base * 2.0 ** min(failures - 1, 60))
        return full * (0.5 + source.random() / 2)


class Blame(StrEnum):
    """Cause of a death: the rows being handled, an external kill, or neither (e.g. a full disk)."""

    ROWS = "rows"
    EXTERNAL = "external"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child ended.

    Attributes:
        normal: orderly end.
        reason: one line for logs and reports.
        final: a restart cannot help, e.g. after a configuration error.
        blame: what caused it.
        counted: whether it uses up the restart intensity. The external kill of a ready child does not in any case.
        detail: traceback or last report of the child.
        cause: name of a process that took this one with it, e.g. the zygote. Deaths of the same cause count once.
        child_failure: report of a supervisor that gave up.
        held_rows: whether it may have held rows although it was asked to stop: it was killed, so it returned none.
    """

    normal: bool
    reason: str
    final: bool = False
    blame: Blame = Blame.ROWS
    counted: bool = True
    detail: str = ""
    cause: str = ""
    child_failure: Failure | None = None
    held_rows: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run ended before its last step: the actor, or other child, whose supervisor gave up."""

    role: str
    reason: str
    traceback: str
