"""Nodes that join a run, each a `relax node` in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from broker.address import Address
from tests.support.running import Run


class Joinable(Protocol):
    """A broker whose run nodes can join."""

    @property
    def port(self) -> int:
        """Its port of the loopback address."""

    @property
    def keys(self) -> Path:
        """Folder with the credentials of the run's users."""


@dataclass(frozen=True)
class Embedded:
    """The broker that a live run has started."""

    port: int
    keys: Path

    @classmethod
    def of(cls, run: Run) -> Embedded:
        """Return that of a run whose address is written."""
        return cls(int(Address.load(run.folder.address).url.rsplit(":", 1)[1]), run.folder.broker / "keys")


class Node:
    """One `relax node`."""

    def __init__(self, broker: Joinable, run: Run, name: str, *roles: str, options: Sequence[str] = ()) -> None:
        self.work = run.cwd / f"node-{name}"
        command = [
            sys.executable,
            "-m",
            "relax_actors.cli.main",
            "node",
            "--broker",
            f"nats://127.0.0.1:{broker.port}",
        ]
        command += ["--credentials", str(broker.keys), "--store", str(run.folder.root / "store"), "--name", name]
        command += ["--work", str(self.work), *(text for role in roles for text in ("--role", role))]
        command += options
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def end(self, number: signal.Signals | None = None, deadline: float = 60.0) -> tuple[int, str]:
        """Wait for its exit, after a signal if one is given; return exit code and output."""
        if number is not None:
            self.process.send_signal(number)
        said, _ = self.process.communicate(timeout=deadline)
        return self.process.returncode, said
