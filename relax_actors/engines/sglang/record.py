"""Where a server is, written by whoever keeps it up and read by the actor that uses it, life after life."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from broker.files import write_private


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A server that is ready: its address, its key, and the process group to kill if it hangs.

    `life` differs from that of any server before it. `group` is 0 for a server that runs elsewhere.
    """

    url: str
    key: str
    life: str
    group: int = 0

    def save(self, path: Path) -> None:
        """Write it, readable for this user only."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> ServerRecord | None:
        """The server of a path; None while there is none that is ready."""
        try:
            return cls(**json.loads(path.read_text()))
        except (FileNotFoundError, ValueError):
            return None
