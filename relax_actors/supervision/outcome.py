"""Outcome of a process: how it ended, and what is to blame."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_actors.isolation.proc import process
from relax_actors.runtime.exit_codes import (
    EXIT_ALL_ROWS_FAILED,
    EXIT_BLAMELESS,
    EXIT_BROKER_UNREACHABLE,
    EXIT_CONFIG,
    EXIT_GAVE_UP,
    EXIT_HUNG,
    EXIT_PEER_LOST,
)
from relax_actors.supervision.spec import Blame, Exit, Failure

STATUS_FD = "RELAX_STATUS_FD"
_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Reason why a supervisor killed a child. `final`: a restart cannot help."""

    reason: str
    final: bool = False
    blame: Blame = Blame.ROWS


def outcome_of(
    code: int,
    verdict: Verdict | None,
    status: ReportedStatus,
    *,
    out_of_memory: bool,
    cause: str = "",
) -> Exit:
    """Classify the end of a process.

    Args:
        code: exit code as of `waitpid`; negative for a signal.
        verdict: why the supervisor killed the process, if it did.
        status: what the child reported by its status pipe.
        out_of_memory: whether the kernel's memory killer was active during the process's life, or cannot be read.
        cause: name of the process that died first and took this one with it, or empty.
    """
    if code == 0 and verdict is None:
        # An orderly end needs a request, and this one did not come from the supervisor.
        return Exit(normal=True, reason="ended", blame=Blame.EXTERNAL if status.stop_requested else Blame.ROWS)
    elsewhere = (EXIT_BROKER_UNREACHABLE, EXIT_PEER_LOST)
    blame = Blame.NONE if code in (EXIT_BLAMELESS, EXIT_ALL_ROWS_FAILED, *elsewhere) else Blame.ROWS
    final = code in (EXIT_CONFIG, EXIT_GAVE_UP, EXIT_ALL_ROWS_FAILED)
    headline, _, rest = status.error.strip().partition("\n")
    if verdict is None and headline and code in (EXIT_HUNG, EXIT_ALL_ROWS_FAILED):
        return Exit(normal=False, reason=headline, final=final, blame=blame, detail=rest)
    if verdict is not None:
        reason, blame, final = verdict.reason, verdict.blame, verdict.final
    elif cause:
        reason, blame = f"killed with {cause}", Blame.EXTERNAL
    elif code < 0:
        reason = f"killed by {_signal_name(-code)}"
        # Rows cause faults, aborts and lack of memory; the other signals are sent from outside.
        if -code in _OUTSIDE and not out_of_memory:
            blame = Blame.EXTERNAL
    else:
        reason = f"exit code {code}"
    last = status.error.strip().splitlines()[-1] if status.error.strip() else ""
    return Exit(
        normal=False,
        reason=f"{reason}: {last}" if last else reason,
        final=final,
        blame=blame,
        counted=code not in elsewhere,
        detail=status.error,
        cause=cause,
        child_failure=status.child_failure,
    )


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def memory_kills() -> int | None:
    """Return how many processes the kernel's memory killer has killed on this machine; None if unknown."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal such as SIGSTOP."""
    state = process(pid)
    return state is not None and state.state in ("T", "t")


@dataclass(slots=True)
class ReportedStatus:
    """What a child reported by its status pipe.

    Attributes:
        ready: it is ready.
        error: the last error it reported before its end.
        stop_requested: it was asked to stop.
        child_failure: for a supervisor: the child below it that it gave up on.
        recorded: for the recorder: last recorded step and evaluated version, see `record/position.py`.
    """

    ready: bool = False
    error: str = ""
    stop_requested: bool = False
    child_failure: Failure | None = None
    recorded: dict[str, int] | None = None

    def update(self, message: dict[str, Any]) -> None:
        """Apply one message."""
        self.ready = self.ready or bool(message.get("ready"))
        self.error = str(message.get("failed", self.error))
        self.stop_requested = self.stop_requested or bool(message.get("stop_requested"))
        if isinstance(child_failure := message.get("child_failure"), list):
            self.child_failure = Failure(*map(str, child_failure))
        if isinstance(recorded := message.get("recorded"), dict):
            self.recorded = recorded


class StatusPipe:
    """The child's end of the pipe to its supervisor."""

    def __init__(self) -> None:
        fd = os.environ.pop(STATUS_FD, None)
        self._fd = int(fd) if fd else None
        if self._fd is not None:
            os.set_inheritable(self._fd, False)

    def ready(self) -> None:
        """Report that the child is ready."""
        self._write({"ready": True})

    def failed(self, text: str) -> None:
        """Report why the child is about to end; the last report counts."""
        self._write({"failed": text[-16000:]})

    def stop_requested(self) -> None:
        """Report that the child was asked to stop."""
        self._write({"stop_requested": True})

    def gave_up(self, failure: Failure) -> None:
        """Report that the child, itself a supervisor, gave up on one of its children."""
        self._write({"child_failure": [failure.role, failure.reason[-4000:], failure.traceback[-16000:]]})

    def recorded(self, position: dict[str, int]) -> None:
        """Report how far the recorder is, as fields of a `Position`."""
        self._write({"recorded": position})

    def _write(self, message: dict[str, Any]) -> None:
        if self._fd is not None:
            with suppress(OSError):
                os.write(self._fd, json.dumps(message).encode() + b"\n")
