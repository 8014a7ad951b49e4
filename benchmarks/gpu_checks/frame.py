"""Frame of the GPU check: each check is a function, runs in a process of its own, and ends as pass, fail or skipped.

A check returns its figures, or raises `Skipped` with the reason why it cannot run here; any other error fails it.
A check that crashes its process, hangs, or leaves processes behind fails alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

Figures: TypeAlias = dict[str, float | int | str | bool]
TAIL_CHARACTERS = 1500
KILL_SECONDS = 10.0
PROGRAM = Path(__file__).parents[1] / "gpu_check.py"


class Skipped(Exception):  # noqa: N818 an outcome, not an error
    """A check cannot run here; the text says why."""


class Failed(Exception):  # noqa: N818 an outcome
    """A check found something wrong; the text says what."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a check runs.

    Attributes:
        device: "cuda" or "cpu".
        is_short: whether the smallest sizes will do.
        folder: an empty folder of the check, removed afterwards.
    """

    device: str
    is_short: bool
    folder: Path

    @property
    def on_gpu(self) -> bool:
        """Whether the check computes on a GPU."""
        return self.device == "cuda"

    def require_gpu(self) -> None:
        """Skip a check that has nothing to say on a CPU.

        Raises:
            Skipped: this is a CPU.
        """
        if not self.on_gpu:
            msg = "needs a GPU"
            raise Skipped(msg)


def is_installed(module: str) -> bool:
    """Whether a module, which may be in a package, can be imported."""
    package = module.rpartition(".")[0]
    return (not package or is_installed(package)) and find_spec(module) is not None


def require(*modules: str) -> None:
    """Skip a check that needs packages which are not installed.

    Raises:
        Skipped: names them.
    """
    if missing := [module for module in modules if not is_installed(module)]:
        msg = f"{' and '.join(missing)} not installed"
        raise Skipped(msg)


@dataclass(frozen=True, slots=True)
class Check:
    """A check.

    Attributes:
        name: its name on the command line.
        run: the check.
        seconds: deadline.
        is_alone: whether no other check may run beside it: it measures time, or leases the GPU as a run does.
        is_short: whether the short check has it, too.
    """

    name: str
    run: Callable[[Place], Figures]
    seconds: float
    is_alone: bool
    is_short: bool

    @property
    def about(self) -> str:
        """First sentence of its description."""
        return (self.run.__doc__ or "").split("\n", 1)[0].rstrip(".")


CHECKS: dict[str, Check] = {}
"""All checks by name."""


def check(
    name: str, *, seconds: float, is_alone: bool = False, is_short: bool = True
) -> Callable[[Callable[[Place], Figures]], Callable[[Place], Figures]]:
    """Register a function as a check; arguments as the attributes of `Check`."""

    def register(run: Callable[[Place], Figures]) -> Callable[[Place], Figures]:
        CHECKS[name] = Check(name, run, seconds, is_alone, is_short)
        return run

    return register


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a check ended.

    Attributes:
        check: its name.
        result: "pass", "fail" or "skipped".
        figures: what it measured.
        reason: why it failed or was skipped; empty if it passed.
        seconds: how long it took.
    """

    check: str
    result: str
    figures: Mapping[str, Any]
    reason: str
    seconds: float


def run_here(name: str, place: Place, result: Path) -> None:
    """Run a check in this process and write how it ended to `result`."""
    figures: Figures = {}
    try:
        figures, ended, reason = CHECKS[name].run(place), "pass", ""
    except Skipped as error:
        ended, reason = "skipped", str(error)
    except Failed as error:
        ended, reason = "fail", str(error)
    body = json.dumps({"result": ended, "figures": figures, "reason": reason})
    part = result.with_suffix(".part")
    part.write_text(body)
    part.replace(result)


_running = set[subprocess.Popen[bytes]]()


def end_running() -> None:
    """Kill the checks that still run; their logs are kept."""
    for process in list(_running):
        _end(process)


def run_apart(name: str, place: Place, logs: Path) -> Outcome:
    """Run a check in a process of its own, with its output in `logs`; kill what it leaves behind."""
    chosen, began = CHECKS[name], time.monotonic()
    place.folder.mkdir(parents=True)
    result, log = place.folder.with_suffix(".json"), logs / f"{name}.log"
    command = [sys.executable, str(PROGRAM), "--device", place.device, *["--short"] * place.is_short]
    command += ["--here", name, str(place.folder), str(result)]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)
        _running.add(process)
        try:
            code: int | None = process.wait(chosen.seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
            _running.discard(process)
            ended = json.loads(result.read_text()) if result.exists() else None
            if ended is None or ended["result"] == "fail":
                _keep_logs(place.folder, logs / name)
    seconds = round(time.monotonic() - began, 1)
    if ended is not None:
        return Outcome(name, ended["result"], ended["figures"], ended["reason"], seconds)
    end = log.read_text(errors="replace")[-TAIL_CHARACTERS:].strip()
    why = f"not done within {chosen.seconds:g} s" if code is None else f"its process ended with exit code {code}"
    return Outcome(name, "fail", {}, f"{why}:\n{end}", seconds)


def _keep_logs(folder: Path, into: Path) -> None:
    """Copy what the runs of a check wrote to their logs and to the terminal."""
    for file in (*folder.glob("*.log"), *folder.glob("*/logs/*")):
        target = into / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of a check: it has ended, or is late."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(KILL_SECONDS)
