"""`relax chaos`: real faults on a live run of this machine, each told in an event."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from relax_actors.cli.connect import Connected, connected
from relax_actors.errors import ConfigError
from relax_actors.journal import Journal
from relax_actors.roles import role_names

NODE, BROKER, ANY = "node", "broker", "any"
PATIENCE = 30.0


def chaos(run: str, target: str, *, every: float, count: int, seed: int, number: signal.Signals) -> int:
    """Signal processes of a run, `count` times, about `every` seconds apart; gives how many were hit.

    Args:
        run: name or folder.
        target: a role, `<role>/<n>`, `any` actor, the `node`'s supervisor, or the embedded `broker`.
        every: mean seconds between faults.
        count: how many.
        seed: of the choice of victims and pauses.
        number: the signal.

    Raises:
        ConfigError: no such target, or the run is not up.
    """
    source = random.Random(seed)  # noqa: S311 no secret
    with connected(run) as at:
        if not at.live:
            msg = f"run {at.config.run.name} is not up; `relax up` it first"
            raise ConfigError(msg)
        _check(at, target)
        journal = Journal(at.table.bridge, at.table.subjects, "chaos", 0)
        hit = 0
        for _ in range(count):
            time.sleep(source.uniform(0.5, 1.5) * every)
            victim = _victim(at, target, source)
            if victim is None:
                break
            name, pid = victim
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
            hit += 1
            journal.event("fault", target=name, pid=pid, signal=number.name)
        return hit


def _check(at: Connected, target: str) -> None:
    role, _, n = target.partition("/")
    names = [*role_names(at.config), ANY, NODE, BROKER]
    if role not in names or (n and not n.isdigit()):
        msg = f"--kill {target!r} is no target; choose among {', '.join(names)}, or <role>/<number>"
        raise ConfigError(msg)
    if role == BROKER and at.config.broker.url is not None:
        msg = "--kill broker: this run uses a broker of yours, which is not ours to kill"
        raise ConfigError(msg)


def _victim(at: Connected, target: str, source: random.Random) -> tuple[str, int] | None:
    """A living process that the target names, waiting for one a while; None when the run is over."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = sorted(_living(at, target))
        if found:
            return source.choice(found)
        if at.folder.finished.exists():
            return None
        time.sleep(0.2)
    return None


def _living(at: Connected, target: str) -> Iterator[tuple[str, int]]:
    role, _, n = target.partition("/")
    if role in (NODE, BROKER):
        wanted = "supervision.node " if role == NODE else "nats-server "
        for pid, command in _commands():
            if wanted in command and str(at.folder.root) in command:
                yield role, pid
        return
    leases = at.table.bridge.call(at.state.leases(), PATIENCE)
    alive = dict(_commands())
    for name, lease in leases.items():
        own, _, number = name.rpartition(".")
        there = lease.get("pid")
        if not isinstance(there, int):
            continue
        if (role in (own, ANY)) and (not n or n == number) and str(at.folder.root) in alive.get(there, ""):
            yield name, there


def _commands() -> Iterator[tuple[int, str]]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                yield int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
