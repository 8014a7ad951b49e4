"""Pumps with the thread of their role, without the actor's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pykka

from relax_actors.runtime import Role
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.pool_pump import PoolPump
from relax_actors.runtime.role_actor import RoleActor
from relax_actors.runtime.watchdog import Watchdog

RoleT, PumpT = TypeVar("RoleT", bound=Role), TypeVar("PumpT")
Make = Callable[[RoleT, pykka.ActorRef[RoleActor], Watchdog], PumpT]


@contextmanager
def started(make: Make[RoleT, PumpT], role: RoleT, box: BlackBox, failed: list[Any]) -> Iterator[PumpT]:
    """Start the role's thread and make its pump; what would end the process is added to `failed`."""
    role.context.fail = failed.append
    watch = Watchdog(role.context, box, 60.0, failed.append)
    actor = RoleActor.start(role, watch)
    try:
        yield make(role, actor, watch)
    finally:
        actor.stop()
        box.close()


@contextmanager
def pool_pump(role: Role, box: BlackBox, failed: list[Any]) -> Iterator[PoolPump]:
    """Make the pump of a pool's actor; see `started`."""
    with started(PoolPump, role, box, failed) as pump:
        yield pump
