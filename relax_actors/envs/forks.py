"""An actor's end of the process that forks sessions (`relax_actors.envs.zygote`)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from relax_actors.config.environment import EnvironmentSection
from relax_actors.envs.frames import open_socket, read_frame
from relax_actors.envs.session import READY
from relax_actors.envs.zygote import FORK, REAP, receive, send
from relax_actors.errors import ActorError, CodecError, ConfigError

MODULE = "relax_actors.envs.zygote"
MAX_STARTING = 4
"""Processes that start at once: hundreds of them would take all processor time from the actor."""
START_SECONDS = 30.0
END_SECONDS = 10.0
"""Time in which the environment's class cleans up after the last session."""


@dataclass(frozen=True)
class Fork:
    """Process of a session, and the streams to it."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Forks:
    """Starts the processes of sessions.

    Args:
        section: settings of the environment, whose class is imported here.
        environment: additional environment variables of the sessions.

    Raises:
        ConfigError: the class does not import, or its options are wrong.
    """

    def __init__(self, section: EnvironmentSection, environment: Mapping[str, str] | None = None) -> None:
        self._control, remote = socket.socketpair()
        with remote:
            # Its parent must be a thread that lives as long as this process: the kernel kills it with that thread.
            self._process = subprocess.Popen(  # noqa: S603 our own module
                [sys.executable, "-P", "-m", MODULE, str(remote.fileno())],
                pass_fds=[remote.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **(environment or {})},
            )
        self._asking, self._starting = asyncio.Lock(), asyncio.Semaphore(MAX_STARTING)
        send(self._control, section.model_dump(mode="json"), sys.path)
        try:
            problem = self._answer()
        except ActorError:
            self.close()
            raise
        if problem:
            self.close()
            raise ConfigError(str(problem))

    @property
    def pid(self) -> int:
        """Id of the process that forks."""
        return self._process.pid

    async def start(self, cpu_seconds: int | None) -> Fork:
        """Fork the process of a session.

        Raises:
            ActorError: the process that forks has ended.
        """
        async with self._starting:
            own, remote = socket.socketpair()
            with remote:
                pid = await self._ask(FORK, cpu_seconds, descriptors=(remote.fileno(),))
            fork = Fork(pid, *await open_socket(own))
            with suppress(
                TimeoutError, asyncio.IncompleteReadError, ConnectionError, CodecError
            ):  # seen at its first use
                async with asyncio.timeout(START_SECONDS):
                    await read_frame(fork.reader, len(READY))
            return fork

    async def end(self, fork: Fork) -> str:
        """Kill the process of a session with all that it started; return how it ended."""
        fork.writer.close()
        with suppress(OSError):
            os.killpg(fork.pid, signal.SIGKILL)
        with suppress(OSError):  # before it made a group of its own
            os.kill(fork.pid, signal.SIGKILL)
        code = int(await self._ask(REAP, fork.pid))
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def close(self) -> None:
        """End the process that forks, and with it those of all sessions."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._process.kill()
        self._process.wait()

    async def _ask(self, *message: Any, descriptors: tuple[int, ...] = ()) -> Any:
        # Requests take well below a millisecond, so they are made in the event loop itself, one at a time.
        async with self._asking:
            try:
                send(self._control, *message, descriptors=descriptors)
                return self._answer()
            except OSError as error:
                msg = f"the process that forks sessions is gone ({error})"
                raise ActorError(msg) from error

    def _answer(self) -> Any:
        received = receive(self._control)
        if received is None:
            msg = f"the process that forks sessions ended with exit code {self._process.wait()}"
            raise ActorError(msg)
        return received[0][0]
