"""`staleness.max` bounds staleness from on-policy to asynchronous, in runs with slow rows and rows without signal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.faults import story_of
from tests.support.running import Run

MakeRun = Callable[..., Run]
STEPS, ROWS = 16, 4
SETTINGS = (
    f"run.steps={STEPS}",
    "algorithm.shaping.filter_zero_variance=true",
    "reward.function=tiny_tasks.share_of_sevens_or_nothing",
)
COLOCATED = 'placement.colocate=[["rollout","trainer"]]'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "more"),
    [(0, ()), (0, (COLOCATED,)), (1, ()), (4, ()), (4, ("rollout.replicas=2", "reward.replicas=2"))],
)
def test_slow_rows_are_trained_and_rows_without_signal_are_replaced(
    make_run: MakeRun, most: int, more: tuple[str, ...]
) -> None:
    run = make_run("mode", *SETTINGS, f"staleness.max={most}", *more)
    result = run.complete()
    assert (result["steps"], result["trained"], result["in_flight"]) == (STEPS, STEPS * ROWS, 0)
    assert result["quarantined"] == 0
    story = story_of(run)
    dropped = story.of("row_dropped")
    assert {event["reason"] for event in dropped} == {"no_signal"}
    assert len(dropped) == result["dropped"] >= STEPS
    steps = story.steps()
    assert [metric["step"] for metric in steps] == list(range(STEPS))
    assert max(metric["staleness"] for metric in steps) <= most
    assert max(metric.get("lead", 0) for metric in story.metrics) <= most
    # Rows of later steps are generated while a step is trained, if staleness.max allows it.
    assert (max(metric["staleness_mean"] for metric in steps) > 0) == (most > 0)
