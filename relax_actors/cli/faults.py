"""The faults of `relax chaos`: signals, a full disk, damaged files."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from relax_actors.engines.sglang import launch
from relax_actors.errors import ConfigError
from relax_actors.monitoring.connection import Connected
from relax_actors.roles import role_names
from relax_actors.runtime.journal import Journal
from relax_actors.supervision.pools import SERVER

NODE, ROOT, BROKER, ANY = "node", "root", "broker", "any"
# What leads to the process of those that have no lease.
_COMMANDS = {NODE: "supervision.node ", BROKER: "nats-server ", SERVER: f"{launch.__name__} "}
LEASE_SECONDS = 30.0
MOST_BALLAST = 8 << 30
_CHUNK = 1 << 20
NEWEST = 6


@dataclass(frozen=True, slots=True)
class Scene:
    """A live run, the journal that tells what is done to it, and the source of choices."""

    at: Connected
    journal: Journal
    source: random.Random


Fault = Callable[[Scene], bool]


class Damage(StrEnum):
    """What can happen to a file."""

    TRUNCATE = "truncate"
    FLIP = "flip"
    DELETE = "delete"


def signalling(target: str, number: signal.Signals) -> Fault:
    """Signal one process.

    Args:
        target: a role, `<role>/<n>`, `any` actor, the `node`'s supervisor, or the embedded `broker`.
        number: the signal.
    """

    def fault(scene: Scene) -> bool:
        _check(scene.at, target)
        found = sorted(_living(scene.at, target))
        if not found:
            return False
        name, pid = scene.source.choice(found)
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        scene.journal.event("fault", target=name, pid=pid, signal=number.name)
        return True

    return fault


def filling_disk(seconds: float) -> Fault:
    """Take all the room of the file system that the run's folder lies on, for some seconds."""

    def fault(scene: Scene) -> bool:
        folder = scene.at.folder.root
        free = shutil.disk_usage(folder).free
        if free > MOST_BALLAST:
            msg = (
                f"--disk-full would take {free >> 20} MiB from all who use the disk of {folder}; put run.folder on a "
                f"file system of its own, with at most {MOST_BALLAST >> 20} MiB free"
            )
            raise ConfigError(msg)
        # Without a name it is gone when this process ends, however it ends.
        with (folder / f".ballast.{os.getpid()}").open("xb") as ballast:
            Path(ballast.name).unlink()
            taken = _fill(ballast.fileno())
            scene.journal.event("fault", target="disk", path=str(folder), mib=taken >> 20, seconds=seconds)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                taken += _fill(ballast.fileno())
                time.sleep(0.2)
        scene.journal.event("fault_over", target="disk", path=str(folder))
        return True

    return fault


def _fill(file: int) -> int:
    """Write until there is no room; gives how many bytes were."""
    taken, size = 0, _CHUNK
    while size:
        try:
            taken += os.write(file, bytes(size))
        except OSError:
            size //= 16
    return taken


def damaging(how: Damage | None) -> Fault:
    """Damage one of the newest files of the store, by a way at random if none is given."""

    def fault(scene: Scene) -> bool:
        root = scene.at.table.store.root
        try:
            # Old ones nobody reads again.
            files = sorted(root.rglob("[!.]*.safetensors"), key=lambda path: path.stat().st_mtime)[-NEWEST:]
            path, way = scene.source.choice(files or [root]), how or scene.source.choice(list(Damage))
            if not files or path.stat().st_size == 0:
                return False
            _damage(path, way, scene.source)
        except FileNotFoundError:
            return False
        scene.journal.event("fault", target="segment", path=str(path.relative_to(root)), damage=way.value)
        return True

    return fault


def _damage(path: Path, way: Damage, source: random.Random) -> None:
    if way is Damage.DELETE:
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if way is Damage.TRUNCATE:
        del data[source.randrange(len(data)) :]
    else:
        # The end of the file holds numbers, its beginning the header.
        at = source.randrange(len(data) // 2, len(data))
        data[at] ^= 1 << source.randrange(8)
    # In its place, not in it: who has mapped the file keeps what it has checked.
    temporary = path.with_name(f".{path.name}.chaos")
    temporary.write_bytes(data)
    temporary.rename(path)


def _check(at: Connected, target: str) -> None:
    role, _, n = target.partition("/")
    names = [*role_names(at.config), *([SERVER] if at.config.owns_servers else []), ANY, NODE, BROKER]
    if role not in names or (n and not n.isdigit()):
        msg = f"{target!r} is no target of chaos; choose among {', '.join(names)}, or <role>/<number>"
        raise ConfigError(msg)
    if role == BROKER and at.config.broker.url is not None:
        msg = "chaos cannot reach the broker: this run uses one of yours, which is not ours to hurt"
        raise ConfigError(msg)


def _living(at: Connected, target: str) -> Iterator[tuple[str, int]]:
    role, _, n = target.partition("/")
    if role in _COMMANDS:
        for pid, command in _commands():
            if _COMMANDS[role] in command and f"{at.folder.root}{f' {n} ' if n else ''}" in command:
                yield role, pid
        return
    leases = at.table.connection.call(at.state.leases(), LEASE_SECONDS)
    alive = dict(_commands())
    for name, lease in leases.items():
        own, _, number = name.rpartition(".")
        there = lease.get("pid")
        wanted_role = role == own or (role == ANY and own not in (NODE, ROOT))
        if not isinstance(there, int) or not wanted_role or (n and n != number):
            continue
        if str(at.folder.root) in alive.get(there, ""):
            yield name, there


def _commands() -> Iterator[tuple[int, str]]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                yield int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
