"""Users of the runs that one server admits.

Each run has an account that owns its streams, and each of its users an account that imports from that one. No account
imports from another run's, so runs on one server cannot reach each other, and the account's quota bounds what a run
can take of the server's disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from broker.errors import BrokerError
from broker.files import write_private
from broker.permissions import Permissions
from broker.subjects import check_name


@dataclass(frozen=True, slots=True)
class RunUsers:
    """Users of one run."""

    run: str
    users: Mapping[str, Permissions]
    """Users with an account of their own, by name: all but the run's operator, who is in the account of the streams."""
    revoked: int = 0
    """Credentials of the run issued at this time (Unix seconds) or before are refused."""
    max_bytes: int = -1
    """Bytes that all replicas of the run's streams may reserve together; -1 for no limit."""

    def save(self, folder: Path) -> None:
        """Write the users to `<run>.json` in a folder."""
        write_private(_file(folder, self.run), json.dumps(asdict(self)))

    def remove(self, folder: Path) -> None:
        """Remove the file that `save` wrote."""
        _file(folder, self.run).unlink(missing_ok=True)

    @classmethod
    def load_all(cls, folder: Path) -> dict[str, RunUsers]:
        """Read the runs of a folder by name; raises BrokerError for a bad file."""
        return {path.stem: cls._load(path) for path in sorted(folder.glob("*.json"))}

    @classmethod
    def _load(cls, path: Path) -> RunUsers:
        try:
            body = json.loads(path.read_text())
            users = {
                str(name): Permissions(*(tuple(known[kind]) for kind in ("publish", "subscribe", "serves", "withheld")))
                for name, known in body["users"].items()
            }
            return cls(check_name(body["run"], "run name"), users, int(body["revoked"]), int(body["max_bytes"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            msg = f"{path} does not hold the users of a run: {error}; remove it and run `relax keys` for the run again"
            raise BrokerError(msg) from error


def _file(folder: Path, run: str) -> Path:
    return folder / f"{check_name(run, 'run name')}.json"
