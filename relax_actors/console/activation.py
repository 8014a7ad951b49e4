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
from contextlib import suppress
from importlib.util import find_spec

import structlog

from broker.process import spawn
from relax_actors.console.link import Link, open_link
from relax_actors.errors import ConfigError
from relax_actors.runtime.run_folder import RunFolder

log = structlog.get_logger()
INSTALL = "the console needs Starlette and uvicorn: pip install 'relax-actors[console]'; --no-console starts none"
PAUSE_SECONDS = 1.0
"""Pause after the end of the process, so that one that cannot work takes no core."""


def lacks_packages() -> str:
    """Return why no console can be started here, and the remedy; empty if it can."""
    return "" if find_spec("starlette") and find_spec("uvicorn") else INSTALL


class Activation(threading.Thread):
    """Thread that starts the console of a run at its first connection.

    Args:
        folder: folder of the run.

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
        while self._waits_for(self._listener):
            try:
                self._serve(self._listener)
            except OSError as error:
                log.warning("console_failed", error=str(error))
            if select.select([self._halt], [], [], PAUSE_SECONDS)[0]:
                break
        self._listener.close()

    def _serve(self, listener: socket.socket) -> None:
        """Run the process until it ends, or until this thread shall end."""
        command = [sys.executable, "-m", "relax_actors.cli.main", "console", str(self._folder.root.resolve())]
        command += ["--listen-fd", str(listener.fileno()), "--no-open"]
        path = self._folder.log("console")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            # In the session of this process: processes that lead a session of their own are taken for orphans.
            process = spawn(command, log=file, pass_fds=(listener.fileno(),), session=False)
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
            process.wait()

    def _waits_for(self, listener: socket.socket) -> bool:
        """Wait for a connection; return False when the thread shall end."""
        return self._halt not in select.select([listener.fileno(), self._halt], [], [])[0]

    def close(self) -> None:
        """End the process and the thread."""
        os.write(self._wake, b"x")
        self.join()
        os.close(self._halt)
        os.close(self._wake)
