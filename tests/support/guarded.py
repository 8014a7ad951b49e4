"""A nats-server that `relax keys` configured, in a process of its own."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from broker.address import Address
from broker.server import find_binary
from relax_actors.cli.credential_files import make_keys
from relax_actors.cli.listeners import Settings
from tests.support.running import TINY, wait_until


@dataclass
class Guarded:
    """A server that `relax keys` configured."""

    keys: Path
    port: int
    settings: list[str]
    process: subprocess.Popen[bytes] | None = None
    scheme: str = "nats"
    websocket: int = 0

    def make(self, settings: Settings | None = None) -> None:
        chosen = settings or Settings()
        listen = f"127.0.0.1:{self.port}"
        make_keys(str(TINY), self.keys, self.settings, replace(chosen, listen=listen))
        self.scheme = "tls" if chosen.tls else "nats"

    def start(self) -> None:
        command = [str(find_binary()), "-c", str(self.keys / "server" / "nats-server.conf")]
        with (self.keys / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self.greets, "greeting of the server")

    def greets(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as connection:
            return connection.recv(5) == b"INFO "
        return False

    def address(self, user: str) -> Address:
        return Address(f"{self.scheme}://127.0.0.1:{self.port}", credentials=str(self.keys)).for_user(user)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


MakeGuarded = Callable[[list[str]], Guarded]
