"""Kills of actors that meet a run which goes on, and that the run has recorded."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from tests.support.faults import has_written, log_of, wait_for_cell
from tests.support.running import DEADLINE, Run, wait_until

T = TypeVar("T")


def kill_actors(run: Run, kills: Iterable[tuple[str, str]]) -> None:
    """Kill each actor once its cell is written, and not all of them after the last step; see `stopped_root`.

    Returns when the run has recorded all deaths.

    Args:
        run: the run.
        kills: cells, by their subjects without the run's prefix, and actors.
    """
    kills, late = list(kills), 0
    wait_for_cell(run, kills[0][0], DEADLINE)
    last = f"weights.{run.folder.load_config().run.steps}"
    with stopped_root(run):
        for cell, actor in kills:
            kill_at(run, actor, cell)
            late += has_written(run, last)
        for actor, times in Counter(actor for _, actor in kills).items():
            died = partial(lambda name, n: len(killed(run, name)) >= n, actor, times)
            wait_until(died, f"{times} deaths of {actor} in the log", 120)
    assert late < len(kills), f"all {late} kills came after the last step; give the run more steps"


def kill_at(run: Run, actor: str, cell: str) -> None:
    """Kill an actor as soon as a cell is written; return when its process has ended."""
    wait_for_cell(run, cell, DEADLINE)
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


def killed(run: Run, actor: str) -> list[dict[str, Any]]:
    """Events of a live run about deaths of an actor by SIGKILL."""
    return [event for event in log_of(run.table, f"event.{actor}.crashed") if "SIGKILL" in event["reason"]]
