"""Which roles a node has, and how its actors are numbered.

Node 0 is that of `relax up`; further ones are `relax node`. The actors of a pool on node k count from `k * SPAN`, so
that no two of a run have one name; a role that owns state has one actor, of number 0, wherever it is.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import xxhash

from broker.files import write_private
from relax_actors.config import BUILT_IN, Config
from relax_actors.config.placement import OPTIONAL
from relax_actors.errors import ConfigError
from relax_actors.roles import replicas, role_names
from relax_actors.runtime.run_folder import RunFolder

SPAN = 1000
SINGLE = ("prompts", "trainer", "evaluator")


@dataclass(frozen=True, slots=True)
class Assignment:
    """Number and name of a node, and how many actors of which roles it has; None for as many as is set.

    `where` is another one for each of two nodes of one name.
    """

    number: int
    name: str
    roles: dict[str, int | None]
    where: str = ""

    def save(self, folder: RunFolder) -> None:
        """Keep it in a node's folder."""
        folder.root.mkdir(parents=True, exist_ok=True)
        write_private(folder.node, json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: RunFolder, config: Config) -> Assignment:
        """What `save` kept; all roles of the run if it kept nothing."""
        kept = cls(**json.loads(folder.node.read_text())) if folder.node.exists() else whole(config)
        return replace(kept, where=where(folder))

    def scaled(self, numbers: dict[str, int]) -> Assignment:
        """With other numbers of actors; of roles that it has not, and of those that own state, they say nothing."""
        known = {role: n for role, n in numbers.items() if role in self.roles and role not in SINGLE and 0 < n < SPAN}
        return replace(self, roles={**self.roles, **known})

    def actors(self, config: Config, role: str) -> list[str]:
        """The names of a role's actors here."""
        wanted = self.roles[role]
        count = replicas(config, role) if wanted is None else wanted
        first = 0 if role in SINGLE else self.number * SPAN
        return [f"{role}.{n}" for n in range(first, first + count)]


def where(folder: RunFolder) -> str:
    """The same for every life of the node that works in a folder, and for no other one.

    Containers of one machine, which may have one name, have roots of their own; in a folder there is one node at a
    time, by its lock.
    """
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    root = next((" ".join(fields[fields.index("-") :]) for fields in reversed(mounts) if fields[4] == "/"), "")
    return xxhash.xxh3_64_hexdigest("|".join([machine, os.uname().nodename, root, str(folder.root)]).encode())


def whole(config: Config, roles: list[str] | None = None) -> Assignment:
    """Node 0: all roles of a run, or some; of ours one may be named that this run does not have.

    Raises:
        ConfigError: no such role.
    """
    known = role_names(config)
    for role in roles or []:
        if role not in (*BUILT_IN, *OPTIONAL):
            check_role_name(config, role)
    chosen: dict[str, int | None] = {role: None for role in known if roles is None or role in roles}
    return Assignment(0, os.uname().nodename, chosen)


def parse(config: Config, number: int, name: str, wanted: list[str]) -> Assignment:
    """A further node, from `role` or `role=number` each.

    Raises:
        ConfigError: no such role, or a number that it cannot have.
    """
    roles: dict[str, int | None] = {}
    for text in wanted:
        role, equals, count = text.partition("=")
        check_role_name(config, role)
        if equals and not (count.isdigit() and 0 < int(count) < SPAN):
            msg = f"--role {text!r} is no role=number with 1 to {SPAN - 1} actors"
            raise ConfigError(msg)
        roles[role] = int(count) if equals else 1
        if role in SINGLE and roles[role] != 1:
            msg = f"--role {text!r}: {role} owns state and has one actor"
            raise ConfigError(msg)
    if not roles:
        msg = f"say what the node is for, e.g. --role rollout=2; roles of this run are {', '.join(role_names(config))}"
        raise ConfigError(msg)
    # In the order in which a run starts them.
    return Assignment(number, name, {role: roles[role] for role in role_names(config) if role in roles})


def check_role_name(config: Config, role: str) -> None:
    """See that a run has a role.

    Raises:
        ConfigError: it has not.
    """
    if role not in role_names(config):
        msg = f"no role {role!r} in run {config.run.name}; there are {', '.join(role_names(config))}"
        raise ConfigError(msg)
