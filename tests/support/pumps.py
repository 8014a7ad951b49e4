"""The pump of a pool's actor with the thread of its role, without the actor's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from relax_actors.runtime import Role
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.pool_pump import PoolPump
from relax_actors.runtime.role_actor import RoleActor
from relax_actors.runtime.watchdog import Watchdog


@contextmanager
def pool_pump(role: Role, box: BlackBox, failed: list[Any]) -> Iterator[PoolPump]:
    """Start the role's thread, and stop it at the end; what would end the process is added to `failed`."""
    role.context.fail = failed.append
    watch = Watchdog(role.context, box, 60.0, failed.append)
    actor = RoleActor.start(role, watch)
    try:
        yield PoolPump(role, actor, watch)
    finally:
        actor.stop()
        box.close()
