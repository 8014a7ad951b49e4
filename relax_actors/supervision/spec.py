"""What is to be supervised, as data, in OTP's words."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class Restart(StrEnum):
    """When an ended child is started again: always, after a failure only, or never."""

    PERMANENT = "permanent"
    TRANSIENT = "transient"
    TEMPORARY = "temporary"


class Strategy(StrEnum):
    """Who is restarted with a failed child: it alone, it and those started after it, or all."""

    ONE_FOR_ONE = "one_for_one"
    REST_FOR_ONE = "rest_for_one"
    ONE_FOR_ALL = "one_for_all"


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child. `shutdown` and `start_deadline` are seconds, and so is `drain`: the time to end in when it is one too
    many, to finish what it has in hand; `shutdown` if not set.
    """

    id: str
    restart: Restart = Restart.PERMANENT
    shutdown: float = 5.0
    start_deadline: float = 180.0
    drain: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """At most `intensity` restarts within `period` seconds; one more, and the supervisor gives up."""

    intensity: int
    period: float


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits before restarts: `base * 2**n` seconds up to `most`, each times a random factor of 0.5 to 1."""

    base: float
    most: float

    def delay(self, failures: int, source: random.Random) -> float:
        """Seconds to wait after the `failures`-th failure in a row, counted from 1."""
        full = min(self.most, self.base * 2.0 ** min(failures - 1, 60))
        return full * (0.5 + source.random() / 2)


class Blame(StrEnum):
    """Whose fault a death may have been: that of the rows in hand, of somebody outside, or of no one of them."""

    ROWS = "rows"
    EXTERNAL = "external"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child ended.

    `final` means that starting it again cannot help (a configuration error). A death that is not `counted` does not
    use up the restart intensity, nor does one from outside of a child that had become ready. Deaths of one `cause`,
    such as that of the zygote which forked them, count once. `below` is the report of a supervisor that gave up.
    """

    normal: bool
    reason: str
    final: bool = False
    blame: Blame = Blame.ROWS
    counted: bool = True
    detail: str = ""
    cause: str = ""
    child_failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run ended before its last step: the actor (or other child) that could not be kept up."""

    role: str
    reason: str
    traceback: str
