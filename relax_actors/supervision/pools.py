"""Who is supervised on a node: the actors of each role, and the inference servers of the run's own."""

from __future__ import annotations

import random
import sys

from relax_actors.config import Config
from relax_actors.roles import replicas, role_names, section_of
from relax_actors.runfolder import RunFolder
from relax_actors.supervision.launch import Launch
from relax_actors.supervision.spec import Backoff, ChildSpec, Limits, Strategy
from relax_actors.supervision.supervisor import Supervisor

SERVER, KEEPER = "server", "relax_actors.supervision.keeper"


def pool_names(config: Config) -> list[str]:
    """The pools of a run in the order of their start: its roles, and the inference servers of its own."""
    return [*([SERVER] if config.owns_servers else []), *role_names(config)]


def specs_of(config: Config, role: str) -> list[ChildSpec]:
    """The actors of a role; one inference server for each actor of the rollout."""
    settings = config.supervision
    if role == SERVER:
        deadline = settings.start_deadline
        return [ChildSpec(f"{SERVER}.{n}", start_deadline=deadline) for n in range(replicas(config, "rollout"))]
    drain = section_of(config, role).deadline + settings.shutdown
    return [
        ChildSpec(f"{role}.{n}", shutdown=settings.shutdown, start_deadline=settings.start_deadline, drain=drain)
        for n in range(replicas(config, role))
    ]


def pools_of(config: Config, source: random.Random) -> dict[str, Supervisor]:
    """A supervisor for each pool, in the order of their start."""
    settings = config.supervision
    return {
        role: Supervisor(
            specs_of(config, role),
            Strategy.ONE_FOR_ONE,
            Limits(settings.intensity, settings.period),
            Backoff(settings.backoff, settings.backoff_max),
            source,
        )
        for role in pool_names(config)
    }


def server_launch(folder: RunFolder, n: int, environment: dict[str, str]) -> Launch:
    """How the inference server of an actor is started."""
    child = f"{SERVER}.{n}"
    command = [sys.executable, "-m", KEEPER, str(folder.root), str(n)]
    return Launch(command, folder.log(child), folder.box(child), environment)
