"""The roles of the training loop, one file each, and how a role is made from its name."""

from __future__ import annotations

import importlib

from relax_actors.config import Config
from relax_actors.config.placement import OPTIONAL
from relax_actors.config.schema import RoleSection
from relax_actors.config.sections import PoolSection
from relax_actors.errors import ConfigError
from relax_actors.registry.dotted import load
from relax_actors.runtime import Role, check_role

_BUILT_IN = {
    "prompts": "relax_actors.roles.prompts:PromptSource",
    "rollout": "relax_actors.roles.rollout:Rollout",
    "reward": "relax_actors.roles.reward:RewardRole",
    "advantages": "relax_actors.roles.advantages:Advantages",
    "trainer": "relax_actors.roles.trainer:Trainer",
    "evaluator": "relax_actors.roles.evaluator:Evaluator",
}


def role_names(config: Config) -> list[str]:
    """The roles of a run, in the order in which they start: those first whose engines need not be imported."""
    scoring = [name for name in OPTIONAL if name in config.roles]
    names = ["reward", *(name for name in config.roles if name not in scoring), "advantages"]
    if config.eval is not None:
        names.append("evaluator")
    return [*names, "prompts", "rollout", *scoring, "trainer"]


def replicas(config: Config, role: str) -> int:
    """Actors of a role."""
    return int(section_of(config, role).replicas)


def section_of(config: Config, role: str) -> PoolSection | RoleSection:
    """The settings of a role's actors; the evaluator has those of `prompts`."""
    if role in config.roles:
        return config.roles[role]
    section: PoolSection = getattr(config, "prompts" if role == "evaluator" else role)
    return section


def role_class(config: Config, name: str) -> type[Role]:
    """The class of a role.

    Raises:
        ConfigError: there is no such role, or it does not import.
    """
    if name in config.roles:
        setting = f"roles.{name}.actor"
        return check_role(load(config.roles[name].actor, setting), setting)
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return check_role(getattr(importlib.import_module(module), attribute), name)
    msg = f"no role {name!r} in this run; there are {', '.join(role_names(config))}"
    raise ConfigError(msg)


def make_role(config: Config, name: str) -> Role:
    """An instance of a role with its options.

    Raises:
        ConfigError: no such role, it does not import, or its options do not fit.
    """
    options = config.roles[name].options if name in config.roles else {}
    return role_class(config, name).build(options, f"roles.{name}")
