"""`/api/run`: where a run stands, in one answer."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

from relax_actors.console.picture import Picture
from relax_actors.console.query import Query
from relax_actors.monitoring.leases import run_waits_for
from relax_actors.monitoring.summary import accounting

RATE_STEPS = 200
"""Steps whose times give the rate."""
SILENT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RunAnswer:
    """State of a run.

    Attributes:
        run: its name.
        folder: its folder.
        live: whether its broker is up.
        finished: whether it has trained its last step.
        step: optimizer steps done.
        steps: steps of the whole run.
        steps_per_second: rate over the last steps done; None while unknown.
        seconds_left: time to the last step at this rate; None while unknown.
        seconds: time between the first and the last step done, pauses included; None before the second.
        waits: what the run waits for; empty if it makes steps.
        sequence: sequence of the log up to which this answer counts.
        figures: newest value of each figure.
        account: counts of rows, as `relax ledger --json` prints them.
        evaluations: mean reward over held-out prompts, as (version, reward).
        actors: actors that are up.
        restarts: restarts of actors since the start of the run.
        algorithm: advantage estimator and policy loss.
        model: kind of the model.
    """

    run: str
    folder: str
    live: bool
    finished: bool
    step: int
    steps: int
    steps_per_second: float | None
    seconds_left: float | None
    seconds: float | None
    waits: str
    sequence: int
    figures: dict[str, float]
    account: dict[str, Any]
    evaluations: list[tuple[int, float]]
    actors: int
    restarts: int
    algorithm: str
    model: str


async def answer(query: Query) -> RunAnswer:
    """Return the state of a run."""
    run = query.run
    picture = await run.refresh()
    settings, leases = run.settings, run.book.current()
    step, steps = picture.ledger.version or 0, settings.run.steps
    rate, times = _rate(picture), [batch.unix_time for batch in picture.ledger.batches.values()]
    finished = picture.finished or run.folder.summary.exists()
    return RunAnswer(
        run=run.name,
        folder=str(run.folder.root),
        live=run.live,
        finished=finished,
        step=step,
        steps=steps,
        steps_per_second=rate,
        seconds_left=(steps - step) / rate if rate and run.live else None,
        seconds=max(times) - min(times) if len(times) > 1 else None,
        waits=_waits(picture, leases) if run.live and not finished else "",
        sequence=picture.log_sequence,
        figures=picture.figures.latest(),
        account=accounting(picture.ledger),
        evaluations=[(version, cell.reward) for version, (cell, _) in sorted(picture.evaluations.items())],
        actors=sum(not name.startswith(("node.", "root.", "owner.")) for name in leases),
        restarts=picture.restarts.total(),
        algorithm=_algorithm(settings),
        model=str(settings.model.path or "from its architecture"),
    )


def _algorithm(settings: Any) -> str:
    return f"advantage {settings.algorithm.advantage}, policy loss {settings.algorithm.surrogate}"


def _rate(picture: Picture) -> float | None:
    times = [batch.unix_time for _, batch in sorted(picture.ledger.batches.items())[-RATE_STEPS:]]
    intervals = [later - earlier for earlier, later in itertools.pairwise(times)]
    # The median leaves out the time during which the run was not up.
    typical = statistics.median(intervals) if intervals else 0.0
    return 1 / typical if typical > 0 else None


def _waits(picture: Picture, leases: dict[str, dict[str, Any]]) -> str:
    """Describe what a run without a recent step waits for."""
    newest = max(picture.ledger.batches, default=None)
    if newest is not None and time.time() - picture.ledger.batches[newest].unix_time < SILENT_SECONDS:
        return ""
    nodes = {name: lease for name, lease in leases.items() if name.startswith("node.")}
    return run_waits_for(nodes, leases.get("trainer.0"))
