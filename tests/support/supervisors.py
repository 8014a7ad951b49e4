"""Supervisors for tests: pure state machines with a fixed random source, and outcomes to feed them."""

from __future__ import annotations

import random
from collections.abc import Iterable

from relax_actors.supervision.spec import Backoff, Blame, ChildSpec, Exit, Limits
from relax_actors.supervision.supervisor import Action, Phase, Start, Stop, Supervisor

CRASH = Exit(normal=False, reason="exit code 70: boom")


DONE = Exit(normal=True, reason="ended")


KILLED = Exit(normal=False, reason="killed by SIGKILL", blame=Blame.EXTERNAL)


CONFIG = Exit(normal=False, reason="exit code 2: no such key", final=True)


PERIOD = 60.0


def supervisor(
    *children: str | ChildSpec,
    intensity: int = 100,
    base: float = 1.0,
    most: float = 64.0,
) -> Supervisor:
    specs = [ChildSpec(child) if isinstance(child, str) else child for child in children]
    return Supervisor(specs, Limits(intensity, PERIOD), Backoff(base, most), random.Random(7))


def up(made: Supervisor, now: float = 0.0) -> Supervisor:
    """Start all children and let them be ready at once."""
    assert made.start(now) == [Start(child) for child in made.children]
    for child in made.children:
        made.ready(child, now)
    return made


def stops(actions: Iterable[Action]) -> list[str]:
    return [action.child for action in actions if isinstance(action, Stop)]


def phases(made: Supervisor) -> dict[str, Phase]:
    return {name: child.phase for name, child in made.children.items()}


def due(made: Supervisor) -> float:
    found = made.next_due()
    assert found is not None
    return found
