"""The process that sends the messages of a run, beside `relax up`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO, Any

import structlog

from relax_actors.config import Config
from relax_actors.monitoring.watcher import Watcher
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.spec import Failure

log = structlog.get_logger()
END_SECONDS = 25.0
"""Longest that `relax up` waits at its end for the last messages."""
BACKOFF, BACKOFF_MAX = 1.0, 60.0


class NotifierProcess:
    """Starts `relax notify` for a run with [notify], and restarts it.

    Nothing that happens to it reaches the run.
    """

    def __init__(self, config: Config) -> None:
        self._folder = RunFolder(config.folder)
        self._process: subprocess.Popen[str] | None = None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        if config.notify is not None:
            self._thread = threading.Thread(target=self._supervise, name="notifier", daemon=True)
            self._thread.start()

    def _supervise(self) -> None:
        backoff = BACKOFF
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                with self._log() as output:
                    self._process = self._start(output)
                self._process.wait()
            except OSError as error:
                log.warning("notifier_not_started", error=str(error))
            backoff = BACKOFF if time.monotonic() - began > BACKOFF_MAX else min(2 * backoff, BACKOFF_MAX)
            self._ending.wait(backoff)

    def _log(self) -> IO[str]:
        path = self._folder.log("notify")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a")

    def _start(self, output: IO[str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "relax_actors.cli.main", "notify", str(self._folder.root), "--child"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, text=True)  # noqa: S603 this program

    def end(self, outcome: dict[str, Any]) -> None:
        """Report the run's end to the process, and wait `END_SECONDS` for its messages."""
        self._ending.set()
        process = self._process
        if process is None or process.stdin is None:
            return
        with suppress(OSError, ValueError):
            process.stdin.write(json.dumps(outcome) + "\n")
            process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def outcome(failure: Failure | None, watcher: Watcher) -> dict[str, str]:
    """Return how the run ended, for its notifier: `kind` and `text`."""
    if failure is not None:
        return {"kind": "gave_up", "text": f"supervision gave up on {failure.role}: {failure.reason}"}
    if watcher.result is None:
        return {"kind": "stopped", "text": f"stopped at step {watcher.progress.step}"}
    summary, curves = watcher.result
    text = f"{summary.steps} steps in {summary.seconds:.0f} s"
    if curves.steps:
        text += f"; mean {curves.figure} {curves.steps[0][1]:.4g} at first, and {curves.steps[-1][1]:.4g} at the end"
    return {"kind": "finished", "text": text}
