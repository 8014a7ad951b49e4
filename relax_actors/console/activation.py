"""The console of `relax up`: listens from the start, and becomes a process when somebody opens its link.

A run that nobody looks at pays for a socket. The process is no part of the run: whatever becomes of it, the run goes
on, and the next connection starts it again.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from contextlib import suppress

import structlog

from broker.process import spawn
from relax_actors.console.link import LINK_VARIABLE, Link, open_link
from relax_actors.errors import ConfigError
from relax_actors.runtime.run_folder import RunFolder

log = structlog.get_logger()
PAUSE_SECONDS, PAUSE_MAX_SECONDS = 1.0, 60.0
"""Pause after the end of the process, and the longest one: a short life doubles the pause."""
SHORT_SECONDS = 10.0
"""A shorter life than this is short."""
NICENESS = 10
"""Of the process, so that it does not slow down the actors of the run."""


class Activation(threading.Thread):
    """Thread that starts the console of a run at its first connection.

    Raises:
        ConfigError: no address can be bound, or the folder cannot be written.
    """

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(name="console", daemon=True)
        self._folder = folder
        try:
            self.link: Link
            self.link, self._listener = open_link(folder.root)
        except OSError as error:
            msg = f"the console cannot write its link: {error}"
            raise ConfigError(msg) from error
        self._halt, self._wake = os.pipe()

    def run(self) -> None:
        """Start the process whenever a connection waits and none runs; the process ends with this thread."""
        pause = PAUSE_SECONDS
        while self._waits_for(self._listener):
            began, failed = time.monotonic(), True
            try:
                failed = self._serve(self._listener) > 0
            except OSError as error:
                log.warning("console_failed", error=str(error))
            is_short = time.monotonic() - began < SHORT_SECONDS
            if select.select([self._halt], [], [], pause if is_short else PAUSE_SECONDS)[0]:
                break
            pause = min(2 * pause, PAUSE_MAX_SECONDS) if is_short else PAUSE_SECONDS
            if failed:
                self._refuse_waiting(self._listener)
        self._listener.close()

    @staticmethod
    def _refuse_waiting(listener: socket.socket) -> None:
        """Close the connections that wait, so that those of clients that are gone start no process."""
        with suppress(BlockingIOError):
            while True:
                listener.accept()[0].close()

    def _serve(self, listener: socket.socket) -> int:
        """Run the process until its end or that of this thread; return its exit code, negative for a signal."""
        command = [sys.executable, "-m", "relax_actors.cli.main", "console", str(self._folder.root.resolve())]
        command += ["--listen-fd", str(listener.fileno()), "--no-open"]
        path = self._folder.log("console")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            # In the session of this process: processes that lead a session of their own are taken for orphans.
            environment = {**os.environ, LINK_VARIABLE: self.link.json()}
            process = spawn(command, log=file, environment=environment, pass_fds=(listener.fileno(),), session=False)
        ended = os.pidfd_open(process.pid)
        try:
            select.select([self._halt, ended], [], [])
        finally:
            os.close(ended)
            if process.poll() is None:
                process.terminate()
                with suppress(Exception):
                    process.wait(5)
            if process.poll() is None:
                process.kill()
            code = process.wait()
        return code

    def _waits_for(self, listener: socket.socket) -> bool:
        """Wait for a connection; return False when the thread shall end."""
        return self._halt not in select.select([listener.fileno(), self._halt], [], [])[0]

    def close(self) -> None:
        """End the process and the thread."""
        os.write(self._wake, b"x")
        self.join()
        os.close(self._halt)
        os.close(self._wake)
