"""Roles that a run needs and that have no actor on any node: nobody writes the columns that other roles wait for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from relax_actors.config import Config
from relax_actors.registry.catalog import ROLES
from relax_actors.roles import FAILURES, built_in_spec, role_names, spec_of

GRACE_SECONDS = 10.0
"""Absence that is not worth a word, e.g. while a node restarts."""
MAX_GAP_SECONDS = 15.0
"""Most that one observation may add: without an answer from the broker nobody can know who is there."""

START = "Start one with `relax node --role {role}=1`, or include {role} in `relax up --roles`"


def needed_roles(config: Config, *, imports: bool = True) -> dict[str, str]:
    """Return the roles without which a run cannot end, with what each writes for whom.

    Roles of the user whose column no role reads are left out; with `imports` their classes are imported, without all
    are left out.
    """
    names = [name for name in role_names(config) if imports or name in ROLES.built_in]
    specs = {name: spec_of(config, name) if imports else built_in_spec(name) for name in names}
    needed = {}
    for name, spec in specs.items():
        columns = [column for column in spec.writes if column not in (*FAILURES, "readmitted")]
        readers = sorted(other for other, its in specs.items() if other != name and set(columns) & set(its.reads))
        if config.advantages.reads in columns:
            readers = sorted({*readers, "advantages"})
        if name not in ROLES.built_in and not readers:
            continue
        what = f"writes column {' and '.join(columns)}" if columns else f"writes cells {' and '.join(spec.numbered)}"
        if spec.serves and not columns and not spec.numbered:
            what = f"answers requests of kind {' and '.join(spec.serves)}"
        needed[name] = f"nobody {what}" + (f", needed by {' and '.join(readers)}" if readers else "")
    return needed


def present_roles(nodes: Iterable[dict[str, Any]]) -> set[str]:
    """Return the roles with an actor on a node, by the nodes' leases; an actor that is being restarted counts."""
    children = [node.get("children") for node in nodes]
    names = [name for states in children if isinstance(states, dict) for name in states]
    return {str(name).rpartition(".")[0] for name in names}


class RoleAbsence:
    """Decides how long a run waits for roles of `needed_roles` that have no actor: `patience` seconds.

    Times are seconds on the monotonic clock.
    """

    def __init__(self, needed: dict[str, str], patience: float) -> None:
        self._needed, self._patience = needed, patience
        self._absent: dict[str, float] = {}
        self._seen: float | None = None

    def observe(self, present: set[str], now: float) -> None:
        """Record which roles have an actor now."""
        gap = 0.0 if self._seen is None else min(now - self._seen, MAX_GAP_SECONDS)
        self._seen = now
        self._absent = {role: self._absent.get(role, -gap) + gap for role in self._needed if role not in present}

    @property
    def notice(self) -> str:
        """What the run waits for; empty if every role has an actor, or lacked one for a moment only."""
        role = self._longest()
        if role is None or self._absent[role] < GRACE_SECONDS:
            return ""
        return f"{self._describe(role)}. The run ends after {self._patience:g} s (supervision.patience)"

    @property
    def overdue(self) -> tuple[str, str] | None:
        """The role that has been absent for too long, and why the run must end; None if there is none."""
        role = self._longest()
        if role is None or self._absent[role] < self._patience:
            return None
        return role, f"{self._describe(role)}. After {self._patience:g} s (supervision.patience) the run was ended"

    def _longest(self) -> str | None:
        return max(self._absent, key=lambda role: self._absent[role], default=None)

    def _describe(self, role: str) -> str:
        seconds = self._absent[role]
        return (
            f"role {role} has had no actor on any node for {seconds:.0f} s: {self._needed[role]}. "
            f"{START.format(role=role)}"
        )
