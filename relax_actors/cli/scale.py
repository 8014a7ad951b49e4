"""`relax scale`: more or fewer actors of a role, while the run is up."""

from __future__ import annotations

import time
from typing import Any

from relax_actors.cli.connect import Connected, connected
from relax_actors.config import Config, validate
from relax_actors.errors import ConfigError
from relax_actors.roles import role_names, section_of

PATIENCE = 120.0


def scale(run: str, settings: list[str]) -> dict[str, int]:
    """Have so many actors of some roles, given as `role=number`, and wait until it is so.

    Those that are too many finish what they have in hand first, for which they have the role's deadline.

    Raises:
        ConfigError: no such role, a number that it cannot have, or the run is not up.
    """
    with connected(run) as at:
        if not at.live:
            msg = f"run {at.config.run.name} is not up; set replicas in its TOML file, or `relax up` it first"
            raise ConfigError(msg)
        wanted = dict(_parse(at.config, setting) for setting in settings)
        body: dict[str, Any] = at.config.model_dump(mode="json")
        for role, number in wanted.items():
            section = body["roles"] if role in body["roles"] else body
            section[role]["replicas"] = number
        at.folder.change_config(validate(body, "relax scale"))
        patience = PATIENCE + max(section_of(at.config, role).deadline for role in wanted)
        end = time.monotonic() + patience
        while (found := _ready(at, wanted)) != wanted:
            if time.monotonic() > end:
                msg = f"asked for {wanted}, there are {found} after {patience:g} s; see `relax tree {run}`"
                raise ConfigError(msg)
            time.sleep(0.2)
        return wanted


def _parse(config: Config, setting: str) -> tuple[str, int]:
    role, _, number = setting.partition("=")
    if role not in role_names(config) or not number.isdigit() or number == "0":
        names = ", ".join(role_names(config))
        msg = f"{setting!r} is no role=number; roles are {names}, and each has at least one actor"
        raise ConfigError(msg)
    if role == "evaluator" and number != "1":
        msg = "the evaluator has one actor: it owns the rows of evaluation"
        raise ConfigError(msg)
    return role, int(number)


def _ready(at: Connected, roles: dict[str, int]) -> dict[str, int]:
    """How many actors each of the roles has; those that start or stop do not count as right."""
    entry = at.table.bridge.call(at.state.leases(), 10).get("node.0", {}).get("children")
    children = entry if isinstance(entry, dict) else {}
    found = dict.fromkeys(roles, 0)
    for name, child in children.items():
        role = name.rpartition(".")[0]
        if role in found:
            found[role] += 1 if isinstance(child, dict) and child.get("phase") == "ready" else len(children) + 1
    return found
