"""Three servers that `relax keys` configured as a cluster, each on a loopback address of its own."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

from broker.server import find_binary
from relax_actors.cli.listeners import Settings
from tests.support.guarded import Guarded
from tests.support.running import wait_until

SERVERS = 3


def free_network() -> str:
    """The first three numbers of loopback addresses that nobody listens on: clusters of other tests have others."""
    while True:
        found = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"
        with socket.socket() as probe:
            if probe.connect_ex((f"{found}.1", 4222)):
                return found


@dataclass
class Cluster(Guarded):
    """A cluster that `relax keys` configured."""

    hosts: tuple[str, ...] = ()
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @classmethod
    def at(cls, keys: Path, settings: list[str]) -> Cluster:
        """A cluster on free addresses, not configured yet."""
        network = free_network()
        hosts = tuple(f"{network}.{n + 1}" for n in range(SERVERS))
        return cls(keys, 4222, [*settings, "broker.replicas=3"], hosts=hosts)

    @property
    def url(self) -> str:
        return ",".join(f"{self.scheme}://{host}:{self.port}" for host in self.hosts)

    @property
    def listen(self) -> str:
        return f"{self.hosts[0]}:{self.port}"

    def make(self, settings: Settings | None = None) -> None:
        super().make(replace(settings or Settings(), cluster=self.hosts))
        for host in self.hosts:
            # Each server has a machine of its own otherwise, with the same address and folder.
            path = self.config(host)
            text = path.read_text().replace(f'listen: "{self.hosts[0]}:', f'listen: "{host}:')
            path.write_text(text.replace('/store"', f'/store-{host}"'))

    def config(self, host: str) -> Path:
        return self.keys / "server" / f"{host}.conf"

    def start(self) -> None:
        for host in self.hosts:
            self.start_one(host)

    def start_one(self, host: str) -> None:
        """Start a server, and wait until it accepts clients."""
        with (self.keys / f"{host}.log").open("ab") as log:
            command = [str(find_binary()), "-c", str(self.config(host))]
            self.processes[host] = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(lambda: self.greets(host), f"greeting of {host}")

    def kill_one(self, host: str) -> None:
        """SIGKILL a server."""
        self.processes[host].kill()
        self.processes[host].wait()

    def reload(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
            process.wait()
