"""Kills of actors that meet a run which goes on, and that the run has recorded."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from tests.support.faults import log_of, wait_for_cell
from tests.support.running import DEADLINE, Run, wait_until

T = TypeVar("T")


def kill_actors(run: Run, kills: Iterable[tuple[str, str]]) -> None:
    """Kill each actor as soon as its cell is written, and wait in the end until the run has recorded all deaths.

    The root is stopped meanwhile, see `stopped_root`: the run cannot end before the last kill.

    Args:
        run: the run.
        kills: cells, by their subjects without the run's prefix, and actors.
    """
    kills = list(kills)
    wait_for_cell(run, kills[0][0], DEADLINE)
    expected = Counter(actor for _, actor in kills)
    for actor in expected:
        expected[actor] += len(killed(run, actor))
    with stopped_root(run):
        for cell, actor in kills:
            wait_for_cell(run, cell, DEADLINE)
            run.kill(actor)
        for actor, deaths in expected.items():
            wait_until(partial(is_recorded, run, actor, deaths), f"{deaths} events of deaths of {actor}", 120)


def kill_at(run: Run, actor: str, cell: str) -> None:
    """Kill an actor as soon as a cell is written; return when the run has recorded its death."""
    wait_for_cell(run, cell, DEADLINE)
    with recorded_death(run, actor):
        run.kill(actor)


def fetched(run: Run, cell: str, expected: type[T]) -> T:
    """Return a cell of a live run, which does not end meanwhile, by its subject without the run's prefix."""
    wait_for_cell(run, "weights.0", DEADLINE)
    with stopped_root(run):
        found: T = wait_until(lambda: run.table.fetch(f"relax.{run.name}.{cell}", expected), cell, DEADLINE)
    return found


@contextmanager
def stopped_root(run: Run) -> Iterator[None]:
    """Stop `relax up`, whose node and broker go on: meanwhile the run does not end, and no operation changes its state.

    So a kill of an actor in the block does not come too late. Broker and node must be up: nobody restarts them.
    """
    assert run.process is not None
    assert run.is_up, f"the run has ended: {run.finish()[2]}"
    run.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        run.process.send_signal(signal.SIGCONT)


@contextmanager
def recorded_death(run: Run, actor: str) -> Iterator[None]:
    """Wait, after the block has killed an actor or a rank of it, for the event that it was killed."""
    before = len(killed(run, actor))
    yield
    wait_until(lambda: len(killed(run, actor)) > before, f"event of the death of {actor}", 120)


def is_recorded(run: Run, actor: str, deaths: int) -> bool:
    """Whether a live run has recorded so many deaths of an actor by SIGKILL."""
    return len(killed(run, actor)) >= deaths


def killed(run: Run, actor: str) -> list[dict[str, Any]]:
    """Events of a live run about deaths of an actor by SIGKILL."""
    return [event for event in log_of(run.table, f"event.{actor}.crashed") if "SIGKILL" in event["reason"]]
