"""Process outside a sandbox that starts the actor in it, connects it to the broker, and ends as it does.

Started by the node's supervisor as `python -m relax_actors.supervision.sandbox_keeper <run folder> <role> <n>` in place
of the actor. The actor listens on the loopback interface of its own network and passes the listening socket out; this
process accepts connections there and copies their bytes from and to the broker. Nothing else leads out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from relax_actors.errors import ConfigError, RelaxError
from relax_actors.isolation.control_group import actor_name, control_group
from relax_actors.runtime.exit_codes import EXIT_CONFIG, EXIT_CRASHED
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.actor_process import OUTER_PID
from relax_actors.supervision.outcome import STATUS_FD, StatusPipe
from relax_actors.supervision.sandbox import SandboxFiles, check_sandbox, command, limits
from relax_actors.supervision.spec import RETURN_ROWS

INNER = "relax_actors.supervision.sandboxed_actor"
CHUNK = 1 << 16
CONNECT_SECONDS, REPEAT_SECONDS = 5.0, 1.0
NATS_PORT = 4222


class SandboxKeeper:
    """Keeper of one incarnation of a sandboxed actor."""

    def __init__(self, folder: RunFolder, role: str, n: int) -> None:
        self._files = SandboxFiles(folder, role, n)
        self._arguments = [str(folder.root), role, str(n)]
        self._stop = asyncio.Event()
        self._pid: int | None = None

    async def run(self) -> int:
        """Run the actor until it ends; return its exit code, negative for a signal."""
        bounds = limits(self._files.folder.load_config(), self._files.role)
        with control_group(actor_name(" ".join(self._arguments)), bounds) as group:
            return await self._run(group.enter if bounds else ())

    async def _run(self, enter: Sequence[str]) -> int:
        own, remote = socket.socketpair()
        info_read, info_write = os.pipe()
        status = [int(fd)] if (fd := os.environ.get(STATUS_FD)) else []
        inner = [sys.executable, "-P", "-m", INNER, str(remote.fileno()), *self._arguments]
        with command(self._files, info_write, inner) as (bwrap, descriptor):
            process = subprocess.Popen(  # noqa: ASYNC220, S603 the loop has nothing else to do yet
                [*enter, *bwrap],
                stdin=subprocess.DEVNULL,
                env=os.environ | {OUTER_PID: str(os.getpid())},
                pass_fds=[remote.fileno(), info_write, descriptor, *status],
            )
        remote.close()
        os.close(info_write)
        ended = asyncio.create_task(asyncio.to_thread(process.wait))
        with open(info_read) as text:  # noqa: ASYNC230, PTH123
            info = await asyncio.to_thread(text.read)
        self._pid = pid = int(json.loads(info)["child-pid"]) if info else None
        _, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, own, 1, 1)
        tasks = [ended, asyncio.create_task(self._pass_on_stop(pid))]
        if descriptors:
            listener = socket.socket(fileno=descriptors[0])
            listener.setblocking(False)
            server = await asyncio.start_server(self._connect, sock=listener)
            tasks.append(asyncio.create_task(server.serve_forever()))
        return await ended

    def request_stop(self) -> None:
        """Handle SIGTERM: pass it on."""
        self._stop.set()

    def pass_on_return(self) -> None:
        """Handle the signal to return rows: pass it on."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, RETURN_ROWS)

    async def _pass_on_stop(self, pid: int | None) -> None:
        """Ask the actor to stop until it ends: the first process of a sandbox ignores signals it cannot handle yet."""
        await self._stop.wait()
        while pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(REPEAT_SECONDS)

    async def _connect(self, inner_reader: asyncio.StreamReader, inner_writer: asyncio.StreamWriter) -> None:
        """Connect one connection of the actor to the first server of the broker that answers."""
        for host, port in servers(self._files.address.url):
            try:
                reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_SECONDS)
            except OSError:
                continue
            # Cancelled when the actor has ended.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(_copy(inner_reader, writer), _copy(reader, inner_writer))
            return
        inner_writer.close()


def servers(url: str) -> list[tuple[str, int]]:
    """Return host and port of each server of a broker's URL."""
    parts = [urlsplit(server) for server in re.split(r",(?=\w+://)", url)]
    return [(part.hostname or "", part.port or NATS_PORT) for part in parts]


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until one side ends, then close both."""
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()


async def keep(folder: RunFolder, role: str, n: int) -> int:
    """Run a sandboxed actor until it ends."""
    keeper = SandboxKeeper(folder, role, n)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, keeper.request_stop)
    loop.add_signal_handler(RETURN_ROWS, keeper.pass_on_return)
    return await keeper.run()


def main() -> None:
    """Keep an actor; the process's entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder, role, n = RunFolder(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    try:
        check_sandbox(folder.load_config(), [role])
        code = asyncio.run(keep(folder, role, n))
    except RelaxError as error:
        StatusPipe().failed(str(error))
        sys.stderr.write(f"{error}\n")
        os._exit(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_CRASHED)
    sys.stderr.flush()
    # bwrap reports the signal that ended the actor as an exit code above 128.
    if code > 128:  # noqa: PLR2004
        with contextlib.suppress(OSError):
            signal.signal(code - 128, signal.SIG_DFL)
        os.kill(os.getpid(), code - 128)
    os._exit(code)


if __name__ == "__main__":
    main()
