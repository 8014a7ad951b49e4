"""Where a server is, written by whoever keeps it up and read by the actor that uses it, life after life."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from broker.files import write_private


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A server that is ready: its address, its key, and the process group to kill if it hangs.

    `life` differs from that of any server before it. `group` is 0 for a server that runs elsewhere. `began` tells the
    process that leads it from others that may get its number later, as in a container that is started again.
    """

    url: str
    key: str
    life: str
    group: int = 0
    began: int = 0

    @property
    def is_own(self) -> bool:
        """Whether the node beside us keeps it: it is on the loopback interface, which no proxy of ours reaches."""
        return self.group > 0

    def kill(self) -> None:
        """SIGKILL the group, if it still is that server's."""
        if self.is_own and began(self.group) == self.began:
            with suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGKILL)

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


def began(pid: int) -> int | None:
    """When a process was started, in ticks of the machine's clock; None if there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
