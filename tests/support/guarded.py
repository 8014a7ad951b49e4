"""A nats-server that `relax keys` configured, in a process of its own."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from broker.address import Address
from broker.connection import Connection
from broker.files import open_lock, try_lock
from broker.listeners import Settings
from broker.permissions import OPERATOR
from broker.server import find_binary
from relax_actors.cli.keys import make_keys
from relax_actors.config import load_config
from relax_actors.supervision.streams import ensure_run_streams
from tests.support.running import TINY, wait_until

PORTS = range(20_000, 30_000)
"""The kernel chooses ports above these for connections and for listeners on port 0."""
_ports = random.Random(os.getpid())
_reserved: list[int] = []
"""Open lock files of the ports in use by this process; they keep other test processes from them."""


def free_port() -> int:
    """Return a port of the loopback address that nobody listens on, and that no other test of this machine gets."""
    folder = Path(tempfile.gettempdir()) / f"relax-test-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for port in _ports.sample(PORTS, len(PORTS)):
        lock = open_lock(folder / str(port))
        if try_lock(lock):
            with socket.socket() as probe, suppress(OSError):
                probe.bind(("127.0.0.1", port))
                _reserved.append(lock)
                return port
        os.close(lock)
    pytest.fail("no port is free")


@dataclass
class Guarded:
    """A server that `relax keys` configured."""

    keys: Path
    port: int
    settings: list[str]
    process: subprocess.Popen[bytes] | None = None
    scheme: str = "nats"
    websocket: int = 0
    toml: Path = TINY

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def listen(self) -> str:
        return f"127.0.0.1:{self.port}"

    def make(self, settings: Settings | None = None) -> None:
        chosen = settings or Settings()
        make_keys(str(self.toml), self.keys, self.settings, replace(chosen, listen=self.listen))
        self.scheme = "tls" if chosen.tls else "nats"

    def admit(self, folder: Path, settings: list[str], chosen: Settings | None = None) -> None:
        """Admit another run, whose credentials go to `folder`, and have the server reload its configuration."""
        make_keys(str(TINY), folder, settings, replace(chosen or Settings(), server=self.keys))
        self.reload()

    def start(self) -> None:
        command = [str(find_binary()), "-c", str(self.keys / "server" / "nats-server.conf")]
        with (self.keys / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._has_begun, "greeting of the server")

    def start_run(self) -> None:
        """Make the credentials, start the server, and create the run's streams and consumers."""
        self.make()
        self.start()
        with closing(Connection(self.address(OPERATOR), "root")) as operator:
            operator.call(ensure_run_streams(operator, load_config(self.toml, self.settings)), 60)

    def _has_begun(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.keys / "server.log").read_text()[-2000:]
        return self.greets()

    def greets(self, host: str = "127.0.0.1") -> bool:
        with suppress(OSError), socket.create_connection((host, self.port), 1) as connection:
            return connection.recv(5) == b"INFO "
        return False

    def address(self, user: str, keys: Path | None = None) -> Address:
        """Address for a user of the run, or of one whose credentials are in another folder."""
        return Address(self.url, credentials=str(keys or self.keys)).for_user(user)

    def reload(self) -> None:
        """Have the server read its configuration again."""
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


MakeGuarded = Callable[..., Guarded]
