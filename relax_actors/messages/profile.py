"""Requests to profile a live actor, and the answers. No stream stores them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ProfileCall:
    """Ask an actor to profile its next steps.

    Attributes:
        steps: optimizer steps of a trainer, or batches of a rollout.
        seconds: time from the request to the last step; then the profile is refused, and what was recorded is dropped.
    """

    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ProfileAnswer:
    """State of a profile; sent every second, and once more at the end.

    Attributes:
        state: "waiting" for the beginning of a step, "running", "written", or "refused".
        detail: why the profile was refused.
        host: name of the machine that has the files.
        files: paths of the written traces, one for each rank.
    """

    state: str
    detail: str = ""
    host: str = ""
    files: list[str] = field(default_factory=list)
