"""An actor's end of the zygote that forks sessions (`relax_actors.envs.zygote`)."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from broker.process import spawn
from relax_actors.config.environment import EnvironmentSection
from relax_actors.envs.frames import open_socket, read_frame
from relax_actors.envs.session import READY
from relax_actors.errors import ActorError, CodecError, ConfigError
from relax_actors.isolation.fork_server import receive, send

MODULE = "relax_actors.envs.zygote"
MAX_STARTING = 4
"""Processes that start at once: hundreds of them would take all processor time from the actor."""
START_SECONDS = 30.0
END_SECONDS = 10.0
"""Time in which the environment's class cleans up after the last session."""


@dataclass(frozen=True)
class Fork:
    """Process of a session: its name for the zygote, its process id, and the streams to it."""

    name: int
    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Forks:
    """Starts the processes of sessions. Use it in a thread that lives as long as this process.

    The environment's class is imported here.

    Raises:
        ConfigError: the class does not import, or its options are wrong.
    """

    def __init__(self, section: EnvironmentSection, environment: Mapping[str, str] | None = None) -> None:
        self._control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folders = os.pathsep.join(path for path in sys.path if path)
        with remote, tempfile.TemporaryFile("w+") as settings:
            json.dump([section.model_dump(mode="json"), sys.path], settings)
            settings.seek(0)
            descriptors = (remote.fileno(), settings.fileno())
            self._process = spawn(
                [sys.executable, "-P", "-m", MODULE, *map(str, descriptors)],
                log=2,
                environment={**os.environ, "PYTHONPATH": folders, **(environment or {})},
                pass_fds=descriptors,
                session=False,
            )
        self._asking, self._starting = asyncio.Lock(), asyncio.Semaphore(MAX_STARTING)
        self._names = itertools.count()
        self._codes: dict[int, int] = {}
        """Exit codes of the forks that have ended and that nobody has asked for, by name."""
        try:
            report = self._receive()
        except ActorError:
            self.close()
            raise
        if problem := report.get("problem"):
            self.close()
            raise ConfigError(str(problem))

    @property
    def pid(self) -> int:
        """Id of the process that forks."""
        return self._process.pid

    async def start(self, cpu_seconds: int | None) -> Fork:
        """Fork the process of a session; raises ActorError if the process that forks has ended."""
        async with self._starting:
            own, remote = socket.socketpair()
            name = next(self._names)
            # Requests take well below a millisecond, so they are made in the event loop itself, one at a time.
            with remote:
                async with self._asking:
                    self._send({"fork": name, "with": cpu_seconds}, (remote.fileno(),))
                    while "forked" not in (report := self._receive()):
                        pass
            fork = Fork(name, report["forked"], *await open_socket(own))
            with suppress(
                TimeoutError, asyncio.IncompleteReadError, ConnectionError, CodecError
            ):  # seen at its first use
                async with asyncio.timeout(START_SECONDS):
                    await read_frame(fork.reader, len(READY))
            return fork

    async def end(self, fork: Fork) -> str:
        """Kill the process of a session with all that it started; return how it ended."""
        fork.writer.close()
        async with self._asking:
            self._send({"kill": fork.name})
            while fork.name not in self._codes:
                self._receive()
        code = self._codes.pop(fork.name)
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def close(self) -> None:
        """End the process that forks, and with it those of all sessions."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._process.kill()
        self._process.wait()

    def _send(self, request: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        try:
            send(self._control, request, descriptors)
        except OSError as error:
            msg = f"the process that forks sessions is gone ({error})"
            raise ActorError(msg) from error

    def _receive(self) -> dict[str, Any]:
        """Receive a report, and keep the exit codes among them."""
        report = None
        with suppress(ConnectionError):
            report, _ = receive(self._control)
        if report is None:
            msg = f"the process that forks sessions ended with exit code {self._process.wait()}"
            raise ActorError(msg)
        if "ended" in report:
            self._codes[report["ended"]] = report["code"]
        return report
