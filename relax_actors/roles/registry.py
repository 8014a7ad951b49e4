"""Find the roles of a run: their names, classes, specs and configuration sections."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cache

from broker.subjects import Kinds
from relax_actors.config import Config
from relax_actors.config.pools import RoleSection
from relax_actors.config.rows import rows_of_roles
from relax_actors.config.sections import PoolSection
from relax_actors.errors import ConfigError
from relax_actors.messages.operations import OPERATION, OperationStep
from relax_actors.registry.catalog import ROLES
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime import Role, StatefulRole, check_role
from relax_actors.runtime.row import FAILURES, ROW_KINDS
from relax_actors.runtime.service_role import ServiceRole


@cache
def built_in_spec(name: str) -> RoleSpec:
    """Spec of a built-in role, whether a run has it or not."""
    return complete_spec(check_role(ROLES.load(name, "role"), name))


@cache
def numbered_cells() -> dict[str, type]:
    """Dataclass of each numbered kind of the built-in roles, in this run or not.

    Operations belong to no role: the operator writes them, and roles with `RoleSpec.operates`.
    """
    own = {kind: cls for name in ROLES.built_in for kind, cls in built_in_spec(name).numbered.items()}
    return {**own, OPERATION: OperationStep}


def table_kinds(own: Iterable[RoleSpec] = ()) -> Kinds:
    """Kinds of cells of a run's table: those of built-in and of given roles."""
    numbered = [*numbered_cells(), *(kind for spec in own for kind in spec.numbered)]
    return Kinds(ROW_KINDS, tuple(dict.fromkeys(numbered)))


def complete_spec(cls: type[Role]) -> RoleSpec:
    """Spec of a role class, with what follows from the class itself."""
    own = (cls.writes,) if cls.writes else ()
    if issubclass(cls, StatefulRole):
        return replace(cls.spec, writes=tuple(dict.fromkeys((*own, *cls.spec.writes))), single=True)
    writes = () if issubclass(cls, ServiceRole) else (*own, *FAILURES)
    return replace(cls.spec, reads=cls.reads, writes=writes, kinds=cls.kinds)


def role_names(config: Config) -> list[str]:
    """Roles of a run in their start order; imports no class of the user's."""
    orders, kinds = {name: RoleSpec().start_order for name in config.roles}, rows_of_roles(config)
    for name in ROLES.built_in:
        spec = built_in_spec(name)
        if spec.section == "roles":
            present = name in config.roles
        else:
            needed = not spec.requires or getattr(config, spec.requires) is not None
            present = needed and spec.rows in kinds
        if present:
            orders[name] = spec.start_order
    return sorted(orders, key=lambda name: orders[name])


def roles_at_start(config: Config) -> list[str]:
    """Roles that `relax up` starts without `--roles`, in their start order."""
    return [name for name in role_names(config) if name in config.roles or not built_in_spec(name).is_elsewhere]


def replicas(config: Config, role: str) -> int:
    """Actors of a role."""
    return int(section_of(config, role).replicas)


def section_of(config: Config, role: str) -> PoolSection | RoleSection:
    """Settings of a role's actors: `replicas`, `deadline` and `memory_limit_mib`."""
    if role in config.roles:
        return config.roles[role]
    section: PoolSection = getattr(config, built_in_spec(role).section)
    return section


def unscalable_roles(config: Config, among: Collection[str]) -> dict[str, str]:
    """Return the roles whose number of actors is fixed in a live run, with the reasons.

    Of `among`, whose classes are imported, those that the run does not have are ignored. Raises as `role_class`.
    """
    names, reasons = role_names(config), {}
    sections = {name: built_in_spec(name).section for name in names if name not in config.roles}
    for name in (name for name in names if name in among):
        section = sections.get(name, "roles")
        sharing = [other for other in sections if other != name and sections[other] == section]
        if spec_of(config, name).single:
            reasons[name] = "owns state and has exactly one actor; scale another role"
        elif name not in sections:
            continue
        elif section not in type(config).model_fields:
            reasons[name] = "has as many actors as other settings of the run require; scale another role"
        elif sharing:
            reasons[name] = (
                f"shares [{section}] with {', '.join(sharing)}, so both would change; set {section}.replicas in the "
                "TOML file and start the run again"
            )
    return reasons


def role_class(config: Config, name: str) -> type[Role]:
    """The class of a role; raises ConfigError if unknown or unusable."""
    if name in config.roles:
        setting = f"roles.{name}.actor"
        return check_role(ROLES.load(config.roles[name].actor, setting), setting)
    if name in ROLES.built_in and name in role_names(config):
        return _built_in_class(config, name)
    msg = f"no role {name!r} in run {config.run.name}; its roles are {', '.join(role_names(config))}"
    raise ConfigError(msg)


def _built_in_class(config: Config, name: str) -> type[Role]:
    """Class of a built-in role, or the class that its section names in its place."""
    setting, usual = f"{name}.actor", check_role(ROLES.load(_variant(config, name), "role"), name)
    path = getattr(section_of(config, name), "actor", name)
    if path == name:
        return usual
    cls = check_role(ROLES.load(path, setting), setting)
    if issubclass(cls, StatefulRole) or cls.writes != usual.writes:
        msg = f"{setting} = {path!r} must be a pool role that writes column {usual.writes!r}, not {cls.writes!r}"
        raise ConfigError(msg)
    needed, more = set(usual.reads), set(cls.reads) - set(usual.reads)
    # Most roles read no column of the user's roles: their actors then import none of these.
    if needed - set(cls.reads) or (more and more - {role.writes for role in _pool_roles(config)}):
        msg = (
            f"{setting} = {path!r} reads {sorted(cls.reads)}; it must read {sorted(needed)}, and beside them only "
            "columns that roles of [roles] write"
        )
        raise ConfigError(msg)
    if config.eval is not None and set(usual.kinds) - set(cls.kinds):
        msg = f"{setting} = {path!r} has kinds {cls.kinds}; with [eval] they must be {usual.kinds}"
        raise ConfigError(msg)
    return cls


def _variant(config: Config, name: str) -> str:
    """Return the class of a built-in role; episodes and teachers have their own."""
    if name != "rollout":
        return name
    if config.agent is not None:
        return "relax_actors.roles.agent_rollout.AgentRollout"
    if config.environment is not None:
        return "relax_actors.roles.turn_rollout.TurnRollout"
    is_taught = config.algorithm.distil.student_share < 1
    return "relax_actors.roles.taught_rollout.TaughtRollout" if is_taught else name


def _pool_roles(config: Config) -> list[type[Role]]:
    """Classes of the user's roles that depend on no reward."""
    classes = [check_role(ROLES.load(section.actor, "role"), name) for name, section in config.roles.items()]
    return [cls for cls in classes if not issubclass(cls, StatefulRole) and "reward" not in cls.reads]


def spec_of(config: Config, name: str) -> RoleSpec:
    """Import the class of a role of the run, and return its spec; raises as `role_class`."""
    return complete_spec(role_class(config, name))


def own_single_roles(config: Config, names: Collection[str]) -> list[str]:
    """The given users' roles that own state and have one actor; raises as `role_class`."""
    return [name for name in names if name in config.roles and spec_of(config, name).single]


def make_role(config: Config, name: str) -> Role:
    """An instance of a role; raises as `role_class`, and ConfigError for bad options."""
    options = config.roles[name].options if name in config.roles else {}
    return role_class(config, name).build(options, f"roles.{name}")
