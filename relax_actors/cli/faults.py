"""Faults of `relax chaos`: signals, a full disk, damaged files."""

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

from relax_actors.engines.backends import inference_backend
from relax_actors.errors import ConfigError
from relax_actors.isolation.proc import command, processes
from relax_actors.monitoring.connection import Connected, connected
from relax_actors.roles import role_names
from relax_actors.runtime.journal import Journal
from relax_actors.supervision.pools import SERVER

NODE, ROOT, BROKER, ANY = "node", "root", "broker", "any"
LEASE_SECONDS = 30.0
WAIT_SECONDS = 30.0
"""How long to wait for a victim, and for the event of a fault to be stored."""
MAX_FILL = 8 << 30
"""Bytes that `filling_disk` writes at most."""
NEWEST_FILES = 6
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Schedule:
    """`count` faults, `every` seconds apart on average; `seed` decides victims and pauses."""

    every: float
    count: int
    seed: int


@dataclass(frozen=True, slots=True)
class Scene:
    """A live run, the journal that logs the faults, and the source of random choices."""

    at: Connected
    journal: Journal
    source: random.Random


Fault = Callable[[Scene], bool]
"""Injects a fault once; returns False if there is no victim yet."""


class Damage(StrEnum):
    """Ways to damage a file."""

    TRUNCATE = "truncate"
    FLIP = "flip"
    DELETE = "delete"


def inject(run: str, fault: Fault, schedule: Schedule) -> int:
    """Inject a fault; return how often it found a victim; raises ConfigError."""
    source = random.Random(schedule.seed)  # noqa: S311 no secret
    with connected(run) as at:
        if not at.live:
            msg = f"run {at.config.run.name} is not up; start it with `relax up`"
            raise ConfigError(msg)
        scene = Scene(at, Journal(at.table.connection, at.table.subjects, "chaos", 0), source)
        done = 0
        for _ in range(schedule.count):
            time.sleep(source.uniform(0.5, 1.5) * schedule.every)
            end = time.monotonic() + WAIT_SECONDS
            while not (hit := fault(scene)) and time.monotonic() < end and not at.folder.summary.exists():
                time.sleep(0.2)
            if not hit:
                break
            done += 1
        # The event of a killed broker is stored once the broker is back, unless the run ends before.
        end = time.monotonic() + WAIT_SECONDS
        while not scene.journal.flush(0.2) and time.monotonic() < end and not at.folder.summary.exists():
            pass
        return done


def signalling(target: str, number: signal.Signals) -> Fault:
    """Return a fault that signals one process.

    Args:
        target: a role, `<role>/<n>`, `any` actor, an inference `server`, the supervisor of the `node`, or the embedded
            `broker`.
        number: the signal.
    """

    def fault(scene: Scene) -> bool:
        _check_target(scene.at, target)
        targets = sorted(_processes(scene.at, target))
        if not targets:
            return False
        name, pid = scene.source.choice(targets)
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        scene.journal.event("fault", target=name, pid=pid, signal=number.name)
        return True

    return fault


def filling_disk(seconds: float) -> Fault:
    """Return a fault that fills the file system of the run's folder for some seconds."""

    def fault(scene: Scene) -> bool:
        folder = scene.at.folder.root
        free = shutil.disk_usage(folder).free
        if free > MAX_FILL:
            msg = (
                f"--disk-full would fill {free >> 20} MiB of the disk of {folder}, which other programs use; put "
                f"run.folder on a file system of its own, with at most {MAX_FILL >> 20} MiB free"
            )
            raise ConfigError(msg)
        # An unlinked file is freed when this process ends, however it ends.
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
    """Write until the disk is full; return the number of bytes written."""
    taken, size = 0, _CHUNK
    while size:
        try:
            taken += os.write(file, bytes(size))
        except OSError:
            size //= 16
    return taken


def damaging(how: Damage | None) -> Fault:
    """Return a fault that damages one of the newest files of the store; None for a random way."""

    def fault(scene: Scene) -> bool:
        root = scene.at.table.store.root
        try:
            # No actor reads the older files again.
            files = sorted(root.rglob("[!.]*.safetensors"), key=lambda path: path.stat().st_mtime)[-NEWEST_FILES:]
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
        # The header is at the start of the file, tensors are at its end.
        at = source.randrange(len(data) // 2, len(data))
        data[at] ^= 1 << source.randrange(8)
    # Replaced, not written in place: a process that has mapped the file must keep the bytes that it verified.
    temporary = path.with_name(f".{path.name}.chaos")
    temporary.write_bytes(data)
    temporary.rename(path)


def _commands(at: Connected) -> dict[str, str]:
    """Part of the command line of each target without a lease."""
    server = inference_backend(at.config).server(at.config)
    commands = {} if server is None else {SERVER: f"{' '.join(server.command[1:])} "}
    return {**commands, NODE: "supervision.node ", BROKER: "nats-server "}


def _check_target(at: Connected, target: str) -> None:
    role, _, n = target.partition("/")
    names = [*role_names(at.config), *_commands(at), ANY]
    if role not in names or (n and not n.isdigit()):
        msg = f"{target!r} is no target of chaos; choose one of {', '.join(names)}, or <role>/<number>"
        raise ConfigError(msg)
    if role == BROKER and at.config.broker.url is not None:
        msg = (
            f"broker {at.table.connection.address.url} was not started by this run; chaos signals embedded brokers only"
        )
        raise ConfigError(msg)


def _processes(at: Connected, target: str) -> Iterator[tuple[str, int]]:
    """Yield name and process id of each live process of a target."""
    role, _, n = target.partition("/")
    if (pattern := _commands(at).get(role)) is not None:
        for pid, words in _command_lines().items():
            if pattern in words and f"{at.folder.root}{f' {n} ' if n else ''}" in words:
                yield role, pid
        return
    leases = at.table.connection.call(at.state.leases(), LEASE_SECONDS)
    alive = _command_lines()
    for name, lease in leases.items():
        own, _, number = name.rpartition(".")
        process = lease.get("pid")
        wanted_role = role == own or (role == ANY and own not in (NODE, ROOT))
        if not isinstance(process, int) or not wanted_role or (n and n != number):
            continue
        # The id in a lease may be of a process on another machine, or reused.
        if str(at.folder.root) in alive.get(process, ""):
            yield name, process


def _command_lines() -> dict[int, str]:
    return {pid: b" ".join([*command(pid), b""]).decode(errors="replace") for pid in processes()}
