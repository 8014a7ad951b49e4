"""GPUs that the actors of a run need."""

from __future__ import annotations

import re
from collections.abc import Iterable

from relax_actors.config import Config
from relax_actors.devices.placement import Need
from relax_actors.engines.backends import footprints
from relax_actors.engines.protocols.footprint import Footprint
from relax_actors.roles.registry import role_names, section_of, spec_of

DEVICE = re.compile(r"(auto|cpu|cuda|mps|xpu|hpu|npu)(?::(\d+))?")
"""Values of a setting `device`."""
_ORDER = {"trainer": 0, "trainer_rank": 0, "critic": 1, "rollout": 2}


def device_of_role(config: Config, role: str) -> str | None:
    """Return the torch device that is set for a role; None for roles that compute on none."""
    if role in config.roles:
        device = config.roles[role].options.get("device", "auto" if spec_of(config, role).device else None)
        return None if device is None else str(device)
    return getattr(getattr(config, role, None), "device", None)


def footprints_of_roles(config: Config, roles: Iterable[str]) -> dict[str, Footprint]:
    """Return what an actor of each computing role needs; imports classes of users' roles."""
    engines = footprints(config)
    needed = {}
    for role in role_names(config):
        if role not in roles:
            continue
        if role in engines:
            needed[role] = engines[role]
        elif gpus := getattr(section_of(config, role), "gpus", None):
            needed[role] = Footprint(gpus=gpus, is_required=True)
        elif gpus is None and spec_of(config, role).device:
            needed[role] = Footprint()
    return needed


def needs_of_roles(config: Config, roles: Iterable[str]) -> dict[str, Need]:
    """Return what an actor of each role on GPUs needs; imports classes of users' roles.

    In the order in which they get GPUs: the trainer first, then critic and rollout.
    """
    wanted = footprints_of_roles(config, roles)
    needs = {}
    for role in sorted(wanted, key=lambda role: _ORDER.get(role, len(_ORDER))):
        kind, first = _parsed(device_of_role(config, role) or "auto")
        if kind in ("auto", "cuda") and wanted[role].gpus:
            needs[role] = Need(
                gpus=wanted[role].gpus,
                first=first,
                group=config.placement.device_of(role),
                is_required=kind == "cuda" or wanted[role].is_required,
                may_use_cpu=wanted[role].computes_on_cpu,
            )
    return needs


def _parsed(device: str) -> tuple[str, int | None]:
    match = DEVICE.fullmatch(device)
    if match is None:
        return "", None
    return match[1], None if match[2] is None else int(match[2])
