"""Runs whose user's code lies in a folder of the test, so that it can be edited while they are up."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker.leases import RunState
from broker.streams import open_bucket
from broker.subjects import Subjects
from tests.support.running import SUPPORT, TINY, Run

LENGTHS = '{"actor": "tiny_lengths.Lengths", "replicas": 2}'
"""Settings of a role with two actors, for an operation that adds it."""
SECTION = '\n[roles.lengths]\nactor = "tiny_lengths.Lengths"\nreplicas = 2\n'


def editable(make_run: Callable[..., Run], folder: Path, name: str, *settings: str, more: str = "") -> Run:
    """Return a tiny run with its modules in a folder of their own; `more` is appended to its TOML file."""
    code = folder / f"{name}-code"
    code.mkdir()
    for module in ("tiny_tasks.py", "tiny_lengths.py"):
        shutil.copy(SUPPORT / module, code / module)
    path = code / "run.toml"
    path.write_text(TINY.read_text() + more)
    return make_run(name, *settings, config=path)


def edit(run: Run, old: str, new: str) -> None:
    """Change the code of the role."""
    path = run.config.parent / "tiny_lengths.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def leases_of(run: Run, role: str) -> dict[str, dict[str, Any]]:
    """Leases of the actors of a role, by name."""
    state = RunState(run.connection, run.connection.call(open_bucket(run.connection, Subjects(run.name)), 20))
    leases: dict[str, dict[str, Any]] = run.connection.call(state.leases(role), 10)
    return leases


def versions(run: Run, role: str = "lengths") -> list[str]:
    """Version of the code of each actor of a role that has a lease."""
    return [lease.get("code", "") for _, lease in sorted(leases_of(run, role).items())]
