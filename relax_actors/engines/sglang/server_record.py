"""Address of a server, written by its keeper and read by the actor that uses it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from broker.files import write_private
from broker.process import kill_group
from relax_actors.isolation.proc import process


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A server that is ready: address, API key, and the process group to kill if it hangs.

    `instance` differs between all servers that were ever started. `process_group` is 0 for an external server.
    `start_ticks` is the start time of the group's leader, which tells it from a later process with the same pid (in a
    restarted container).
    """

    url: str
    key: str
    instance: str
    process_group: int = 0
    start_ticks: int = 0

    @property
    def is_own(self) -> bool:
        """Whether the run started the server: on the loopback interface, never behind a proxy."""
        return self.process_group > 0

    def kill(self) -> None:
        """SIGKILL the server's process group, if it still is the same one.

        Does nothing to external servers.
        """
        leader = process(self.process_group) if self.is_own else None
        if leader is not None and leader.start == self.start_ticks:
            kill_group(self.process_group)

    def save(self, path: Path) -> None:
        """Write the record to a file that only this user can read."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> ServerRecord | None:
        """Read a record; return None while no server is ready."""
        try:
            return cls(**json.loads(path.read_text()))
        except (FileNotFoundError, ValueError):
            return None
