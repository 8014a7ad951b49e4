"""Roles of each node, and the numbers of its actors.

Node 0 belongs to `relax up`; `relax node` adds others. The actors of a pool on node k are numbered from `k * SPAN`, so
that no two actors of a run share a name. A role that owns state has one actor, number 0, on the node that has the role.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import xxhash

from broker.files import write_private
from broker.subjects import NAME
from relax_actors.config import Config
from relax_actors.devices.inventory import NO_REQUEST, GpuRequest
from relax_actors.devices.placement import Need
from relax_actors.errors import ConfigError
from relax_actors.operations.plan import FIRST_ENGINE, SPAN
from relax_actors.registry.catalog import ROLES
from relax_actors.roles import built_in_spec, own_single_roles, replicas, role_names, roles_at_start, spec_of
from relax_actors.roles.gpus import needs_of_roles
from relax_actors.runtime.run_folder import RunFolder

MAX_DIGITS = 8
LEAVE_SECONDS = 4.0
"""Seconds for a node to release its leases and end after its actors, of its grace; at most half of it."""


@dataclass(frozen=True, slots=True)
class Code:
    """Copy of the user's code that an actor imports.

    Attributes:
        version: of the code; see `runtime.user_code`.
        since: what had the actor start with it, such as the number of an operation; the actor is restarted when it
            differs. Empty for an actor that runs this code already.
    """

    version: str
    since: str = ""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Roles of one node.

    Attributes:
        number: of the node.
        name: of the node; several machines may have one name.
        roles: actors of each role; None for as many as the configuration says.
        where: differs between two nodes of one name; see `where`.
        own_single: single roles among those of the user, so that a supervisor need not import their classes.
        needs: what an actor of each role needs that computes on GPUs.
        gpus: GPUs that it is asked to use.
        grace: seconds from the request to leave to its end; None for the deadlines of its roles.
        spot: whether it may vanish at any instant, so that its actors get rows only above a backlog.
        engines: numbers of the rollout actors that are clients of external engines, see `relax_actors.operations`.
        expelled: names of actors that leave and return their rows at once, instead of finishing them.
        on_probation: names of actors whose failures do not end the run: the operation that starts them fails instead.
        code: the copy of the user's code that an actor imports, by its name, or by its role for actors without an
            entry of their own; the files in place for all others.
        kept: version of the code of each role at the start of the run, of which the store has a copy.
        moved: roles that an operation has moved to the node.
    """

    number: int
    name: str
    roles: dict[str, int | None]
    where: str = ""
    own_single: list[str] = field(default_factory=list)
    needs: dict[str, Need] = field(default_factory=dict)
    gpus: GpuRequest = NO_REQUEST
    grace: float | None = None
    spot: bool = False
    engines: list[int] = field(default_factory=list)
    expelled: list[str] = field(default_factory=list)
    on_probation: list[str] = field(default_factory=list)
    code: dict[str, Code] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)

    @property
    def single(self) -> list[str]:
        """Roles of this node that own state and have one actor in the whole run."""
        return [
            role
            for role in self.roles
            if role in self.own_single or (role in ROLES.built_in and built_in_spec(role).single)
        ]

    @property
    def drain_limit(self) -> float | None:
        """Seconds that its actors have to leave the run; None for the deadlines of their roles."""
        return None if self.grace is None else max(self.grace - LEAVE_SECONDS, self.grace / 2)

    def save(self, folder: RunFolder) -> None:
        """Write it to the node's folder."""
        folder.root.mkdir(parents=True, exist_ok=True)
        write_private(folder.node, json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: RunFolder, config: Config) -> Assignment:
        """Read what `save` wrote; all roles of the run if there is no file."""
        if not folder.node.exists():
            return replace(whole(config), where=where(folder))
        fields = json.loads(folder.node.read_text())
        needs = {role: Need(**need) for role, need in fields.pop("needs", {}).items()}
        gpus = GpuRequest(**fields.pop("gpus", {}))
        code = {actor: Code(**entry) for actor, entry in fields.pop("code", {}).items()}
        return replace(cls(**fields), needs=needs, gpus=gpus, code=code, where=where(folder))

    def scaled(self, numbers: dict[str, int]) -> Assignment:
        """The assignment with other numbers of actors; ignores single roles and roles that the node does not have."""
        known = {
            role: n for role, n in numbers.items() if role in self.roles and role not in self.single and 0 < n < SPAN
        }
        return replace(self, roles={**self.roles, **known})

    def with_role(self, config: Config, role: str) -> Assignment:
        """The assignment with a further role of the run, whose class is imported."""
        wanted = {**self.roles, role: None}
        roles = {name: wanted[name] for name in role_names(config) if name in wanted}
        own_single = list(dict.fromkeys([*self.own_single, *own_single_roles(config, [role])]))
        # Needs are in the order in which roles get GPUs.
        return replace(self, roles=roles, own_single=own_single, needs=needs_of_roles(config, roles))

    def without_role(self, role: str) -> Assignment:
        """The assignment without a role, and without the copies of code that its actors imported."""

        def is_other(name: str) -> bool:
            return role not in (name, name.rpartition(".")[0])

        return replace(
            self,
            roles={name: number for name, number in self.roles.items() if is_other(name)},
            own_single=[name for name in self.own_single if is_other(name)],
            needs={name: need for name, need in self.needs.items() if is_other(name)},
            moved=[name for name in self.moved if is_other(name)],
            expelled=[name for name in self.expelled if is_other(name)],
            on_probation=[name for name in self.on_probation if is_other(name)],
            code={name: code for name, code in self.code.items() if is_other(name)},
            kept={name: version for name, version in self.kept.items() if is_other(name)},
        )

    def code_of(self, actor: str) -> Code | None:
        """Return the copy of the user's code that an actor imports; None for the files in place."""
        return self.code.get(actor) or self.code.get(actor.rpartition(".")[0])

    def actors(self, config: Config, role: str) -> list[str]:
        """Names of a role's actors on this node."""
        wanted = self.roles[role]
        count = replicas(config, role) if wanted is None else wanted
        first = 0 if role in self.single else self.number * SPAN
        return [f"{role}.{n}" for n in range(first, first + count)]

    def clients(self, role: str) -> list[str]:
        """Names of the actors of a role on this node that are clients of external engines."""
        return [f"{role}.{n}" for n in self.engines] if role == "rollout" else []


def is_client(actor: str) -> bool:
    """Whether an actor is the client of an external engine that joined at run time: it computes on no GPU here."""
    role, _, n = actor.rpartition(".")
    return role == "rollout" and n.isdigit() and int(n) >= FIRST_ENGINE


def is_spot(folder: RunFolder) -> bool:
    """Whether the node that works in a folder is marked as spot."""
    return folder.node.exists() and json.loads(folder.node.read_text()).get("spot") is True


def check_spot(config: Config, node: Assignment) -> None:
    """Check that all roles of a node marked as spot may be there.

    Raises:
        ConfigError: a role may not.
    """
    if refused := [role for role in node.roles if not spec_of(config, role).may_be_spot]:
        able = [role for role in role_names(config) if spec_of(config, role).may_be_spot]
        msg = (
            f"--spot is for roles whose actors may get rows only above a backlog ({', '.join(able) or 'none here'}), "
            f"not for {', '.join(refused)}; start a node without --spot for them"
        )
        raise ConfigError(msg)


def where(folder: RunFolder) -> str:
    """Identify the node that works in a folder, across its incarnations.

    Containers on one machine may share a host name but have different root mounts. One folder has one node at a time,
    by its lock.
    """
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    root = next((" ".join(fields[fields.index("-") :]) for fields in reversed(mounts) if fields[4] == "/"), "")
    return xxhash.xxh3_64_hexdigest("|".join([machine, os.uname().nodename, root, str(folder.root)]).encode())


def whole(config: Config, roles: list[str] | None = None) -> Assignment:
    """Node 0, with the roles of `roles_at_start` or with some; built-in roles that the run does not have are ignored.

    Raises:
        ConfigError: unknown role, or its class does not import.
    """
    for role in roles or []:
        if role not in ROLES.built_in:
            check_role_name(config, role)
    wanted = roles_at_start(config) if roles is None else roles
    chosen: dict[str, int | None] = {role: None for role in role_names(config) if role in wanted}
    return Assignment(
        0,
        os.uname().nodename,
        chosen,
        own_single=own_single_roles(config, chosen),
        needs=needs_of_roles(config, chosen),
    )


def parse(config: Config, number: int, name: str, wanted: list[str]) -> Assignment:
    """A further node, from a list of `role` or `role=number`.

    Raises:
        ConfigError: unknown role, its class does not import, or it cannot have so many actors.
    """
    roles: dict[str, int | None] = {}
    for text in wanted:
        role, count = split_wanted(text)
        check_role_name(config, role)
        roles[role] = count
    if not roles:
        msg = f"name the node's roles, e.g. --role rollout=2; roles of this run are {', '.join(role_names(config))}"
        raise ConfigError(msg)
    # In the order in which a run starts them.
    ordered = {role: roles[role] for role in role_names(config) if role in roles}
    node = Assignment(
        number,
        name,
        ordered,
        own_single=own_single_roles(config, ordered),
        needs=needs_of_roles(config, ordered),
    )
    if several := [role for role in node.single if roles[role] != 1]:
        msg = f"--role {several[0]}={roles[several[0]]}: {several[0]} owns state and has one actor"
        raise ConfigError(msg)
    return node


def split_wanted(text: str) -> tuple[str, int]:
    """Return role and number of actors of `role` or `role=number`, without knowing the run.

    Raises:
        ConfigError: it is neither.
    """
    role, equals, count = text.partition("=")
    is_number = count.isascii() and count.isdecimal() and len(count) < MAX_DIGITS and 0 < int(count) < SPAN
    if not NAME.fullmatch(role) or (equals and not is_number):
        msg = f"--role {text[:80]!r} is no role=number with 1 to {SPAN - 1} actors"
        raise ConfigError(msg)
    return role, int(count) if equals else 1


def check_role_name(config: Config, role: str) -> None:
    """Refuse a role that the run does not have.

    Raises:
        ConfigError: there is no such role.
    """
    if role not in role_names(config):
        msg = f"no role {role!r} in run {config.run.name}; its roles are {', '.join(role_names(config))}"
        raise ConfigError(msg)
