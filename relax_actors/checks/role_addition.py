"""Check of a role that is to join a live run, from the TOML file that describes it."""

from __future__ import annotations

from typing import Any

from relax_actors.checks.examine import check_role
from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.roles import role_names
from relax_actors.roles.fitting import check_addition
from relax_actors.supervision.resume import Effect, compare, listed
from relax_actors.supervision.role_changes import check_machine


def settings_of_addition(file: Config, live: Config, role: str) -> dict[str, Any]:
    """Check a TOML file's role against a live run, and return its settings.

    Raises:
        ConfigError: the file has no such role, differs from the run in other settings, or the role does not fit.
    """
    if role in role_names(live):
        msg = f"the run has a role {role} already; `relax roles replace {live.run.name} {role}` gives it other code"
        raise ConfigError(msg)
    if role not in file.roles:
        own = ", ".join(f"roles.{name}" for name in file.roles) or "none"
        msg = f"the file has no section [roles.{role}]; its roles are {own}"
        raise ConfigError(msg)
    body = file.model_dump(mode="json")["roles"][role]
    after = live.model_copy(update={"roles": {**live.roles, role: file.roles[role]}})
    check_addition(live, after, role)
    check_role(after, role)
    check_machine(after, role)
    others = [
        c for c in compare(live, file) if c.effect is not Effect.NONE and not c.key.startswith(("roles.", "run."))
    ]
    if others:
        msg = (
            f"the file differs from the run that is up in more than its roles:\n{listed(others)}\n`relax roles add` "
            "adds a role and changes nothing else; restore these settings, or stop the run and start it again"
        )
        raise ConfigError(msg)
    return dict(body)
