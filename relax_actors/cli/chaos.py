"""`relax chaos`: real faults on a live run of this machine, each told in an event."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from relax_actors.cli import faults
from relax_actors.errors import ConfigError
from relax_actors.monitoring.connection import connected
from relax_actors.runtime.journal import Journal

PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """`count` faults, about `every` seconds apart; `seed` of the choice of victims and pauses."""

    every: float
    count: int
    seed: int


def chaos(run: str, fault: Callable[[faults.Scene], bool], schedule: Schedule) -> int:
    """Do a fault again and again; gives how often it was done.

    Args:
        run: name or folder.
        fault: does it once; False if there is nothing yet to do it to.
        schedule: when.

    Raises:
        ConfigError: no such target, or the run is not up.
    """
    source = random.Random(schedule.seed)  # noqa: S311 no secret
    with connected(run) as at:
        if not at.live:
            msg = f"run {at.config.run.name} is not up; `relax up` it first"
            raise ConfigError(msg)
        scene = faults.Scene(at, Journal(at.table.connection, at.table.subjects, "chaos", 0), source)
        done = 0
        for _ in range(schedule.count):
            time.sleep(source.uniform(0.5, 1.5) * schedule.every)
            end = time.monotonic() + PATIENCE
            while not (hit := fault(scene)) and time.monotonic() < end and not at.folder.summary.exists():
                time.sleep(0.2)
            if not hit:
                break
            done += 1
        # After a kill of the broker its event is stored once that is back, if the run does not end before.
        end = time.monotonic() + PATIENCE
        while not scene.journal.flush(0.2) and time.monotonic() < end and not at.folder.summary.exists():
            pass
        return done
