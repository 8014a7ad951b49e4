"""Three servers that `relax keys` configured as a cluster, each on a loopback address of its own."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import nats.errors
from nats.js.errors import APIError

from broker.connection import Connection
from broker.listeners import Settings
from broker.permissions import OPERATOR, bucket_stream
from broker.server import find_binary
from broker.subjects import Subjects
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


async def is_current(connection: Connection, stream: str) -> bool:
    """Whether all servers of a cluster have every message of a stream."""
    try:
        cluster = (await connection.js.stream_info(stream)).cluster
    except (nats.errors.Error, APIError):
        return False
    replicas = (cluster.replicas if cluster else None) or []
    return len(replicas) == SERVERS - 1 and all(peer.current and not peer.offline for peer in replicas)


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

    @property
    def run_settings(self) -> list[str]:
        """Settings with which a run uses this cluster."""
        return [f"broker.url={self.url}", f"broker.credentials={self.keys}", "broker.replicas=3"]

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

    def wait_until_current(self, run: str) -> None:
        """Wait until each server has every message of a run, so that the loss of another one stops nothing."""
        subjects = Subjects(run)
        with closing(Connection(self.address(OPERATOR), "test")) as connection:
            for stream in (subjects.table_stream, subjects.log_stream, bucket_stream(subjects)):
                wait_until(partial(self._is_current, connection, stream), f"replicas of {stream}", 120)

    @staticmethod
    def _is_current(connection: Connection, stream: str) -> bool:
        return connection.call(is_current(connection, stream), 20)

    def reload(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
            process.wait()
