"""Supervised children of a node: the actors of each role, and an inference server beside each rollout if needed."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable

from relax_actors.config import Config
from relax_actors.engines.backends import inference_backend
from relax_actors.record.position import RECORDER
from relax_actors.roles import section_of
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.assignment import Assignment
from relax_actors.supervision.launch import Launch
from relax_actors.supervision.reporter import split_child_id
from relax_actors.supervision.spec import Backoff, ChildSpec, Limits
from relax_actors.supervision.supervisor import Supervisor

SERVER = "server"
"""Pool of the inference servers, and the first part of their children's names."""
LATE_START = 3.0
"""Seconds that the recorder has to stop, in those of an actor: a short run may end before the recorder has started."""
KEEPER_MODULE = "relax_actors.supervision.inference_server"


def pool_names(config: Config, node: Assignment) -> list[str]:
    """Pools of a node in their start order: inference servers for its rollouts, then its roles."""
    serves = "rollout" in node.roles and inference_backend(config).server(config) is not None
    return [*([SERVER] if serves else []), *node.roles]


def specs_of(config: Config, node: Assignment, pool: str) -> list[ChildSpec]:
    """Actors of a role on a node; for the pool of servers, one server for each rollout actor."""
    settings = config.supervision
    if pool == SERVER:
        numbers = [split_child_id(name)[1] for name in node.actors(config, "rollout")]
        return [ChildSpec(f"{SERVER}.{n}", start_deadline=settings.start_deadline) for n in numbers]
    drain = section_of(config, pool).deadline + settings.shutdown
    return [
        ChildSpec(
            name,
            settings.shutdown,
            settings.start_deadline,
            drain,
            returns_rows=True,
            on_probation=name in node.on_probation,
        )
        for name in [*node.actors(config, pool), *node.clients(pool)]
    ]


def children_of(config: Config, node: Assignment) -> list[str]:
    """Names of all children of a node."""
    return [spec.id for pool in pool_names(config, node) for spec in specs_of(config, node, pool)]


def pools_of(config: Config, node: Assignment, source: random.Random) -> dict[str, Supervisor]:
    """A supervisor for each pool of a node, in their start order."""
    return {pool: make_pool(config, specs_of(config, node, pool), source) for pool in pool_names(config, node)}


def make_pool(config: Config, specs: list[ChildSpec], source: random.Random) -> Supervisor:
    """A supervisor with the limits of the run."""
    settings = config.supervision
    limits, backoff = Limits(settings.intensity, settings.period), Backoff(settings.backoff, settings.backoff_max)
    return Supervisor(specs, limits, backoff, source)


def observers_of(config: Config) -> dict[str, Supervisor]:
    """Supervisors of processes beside the node that the run does not depend on: they fail as often as they like."""
    if config.record.max_mib == 0 or config.simulate is not None:
        return {}
    settings = config.supervision
    specs = [ChildSpec(RECORDER, shutdown=LATE_START * settings.shutdown, start_deadline=settings.longest_start)]
    limits, backoff = Limits(sys.maxsize, settings.period), Backoff(settings.backoff, settings.backoff_max)
    return {RECORDER: Supervisor(specs, limits, backoff, random.Random(0))}  # noqa: S311 jitter


def secrets_of(config: Config, roles: Iterable[str]) -> set[str]:
    """Names of the environment variables with secrets that the actors of some roles get."""
    return {name for role in roles for name in section_of(config, role).secrets or ()}


def server_launch(folder: RunFolder, n: int, environment: dict[str, str]) -> Launch:
    """How the keeper of the inference server of rollout actor `n` is started."""
    child = f"{SERVER}.{n}"
    command = [sys.executable, "-m", KEEPER_MODULE, str(folder.root), str(n)]
    return Launch(command, folder.log(child), folder.black_box(child), environment)
