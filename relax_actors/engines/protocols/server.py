"""Inference servers: how a node runs one beside each rollout actor, and where the actor finds it.

A keeper, which knows no engine (`relax_actors.supervision.inference_server`), starts the server in its own process
group with a free port and a random API key, and writes its `ServerRecord` once it generates. Server and actor survive
each other's death: the actor's next incarnation reads the record and continues with the same server. If the keeper
dies, its janitor kills the server. If the server dies, the keeper ends, and the node's supervisor restarts both.
"""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from broker.files import write_private
from broker.process import kill_group
from relax_actors.isolation.proc import process


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """How the server of a rollout actor is started and asked for its health; see `InferenceBackend.server`.

    Its output goes to the log of the child `server.<number>`.
    """

    command: tuple[str, ...]
    """Program and arguments. Appended are the folder of the run, the number of the actor, and the port of the loopback
    interface to listen on."""
    health: str
    """Path that a live server answers with status 200 to a request with the API key as a bearer token."""
    generates: str
    """Path that is answered with status 200 once the server generates; it may answer without the key."""
    key_variable: str
    """Environment variable in which the server gets its API key."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables. TMPDIR is a folder that is removed after the server's end."""
    silent_seconds: float = 60.0
    """A ready server that does not answer `health` for so long is killed."""
    shared_memory: tuple[str, ...] = ()
    """Beginnings of the names of shared-memory segments that the server may leave when it is killed."""
    leave: Callable[[ServerRecord, Callable[[], bool]], None] | None = None
    """Have the server free the memory of its device, where roles take turns there, unless it has left already or its
    actor holds the device again, as the second argument tells; raises an error if the server stays. The keeper calls it
    after each turn of the actor, which may have been killed in the turn, and then kills a server that stays."""


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


def generates(record: ServerRecord, spec: ServerSpec, seconds: float) -> bool:
    """Whether the server of a record generates. The second request needs the key, which another server at this port
    would refuse; the first may be answered without it.
    """
    return answers(record, spec.generates, seconds) and answers(record, spec.health, seconds)


def answers(record: ServerRecord, path: str, seconds: float) -> bool:
    """Whether the server answers a path with status 200; proxies of the environment are bypassed."""
    request = urllib.request.Request(  # noqa: S310 always http
        record.url + path, headers={"Authorization": f"Bearer {record.key}"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with suppress(OSError), direct.open(request, timeout=seconds) as answer:
        return bool(answer.status == 200)  # noqa: PLR2004
    return False


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
