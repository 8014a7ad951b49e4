"""Several optimizer updates with one batch: which rows form a minibatch, and the metrics of all updates."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from relax_actors.engines.protocols import StepResult
from relax_actors.training.step_feed import combine_updates, minibatches


@settings(max_examples=20)
@given(parts=st.integers(1, 4), rows=st.integers(1, 5), epochs=st.integers(1, 3), step=st.integers(0, 9))
def test_each_epoch_trains_every_row_once_in_parts_of_equal_size(parts: int, rows: int, epochs: int, step: int) -> None:
    found = list(minibatches(rows * parts, parts, epochs, seed=3, step=step))
    assert found == list(minibatches(rows * parts, parts, epochs, seed=3, step=step))
    assert len(found) == parts * epochs
    for epoch in range(epochs):
        cut = found[epoch * parts : (epoch + 1) * parts]
        assert all(part == sorted(part) and len(part) == rows for part in cut)
        assert sorted(row for part in cut for row in part) == list(range(rows * parts))


def test_the_parts_depend_on_seed_step_and_epoch() -> None:
    cuts = {str(list(minibatches(16, 2, 1, seed, step))) for seed in (1, 2) for step in (0, 1)}
    assert len(cuts) == 4
    first, _, third, _ = minibatches(16, 2, 2, 1, 0)
    assert first != third


def test_metrics_of_the_updates_of_a_batch_are_combined() -> None:
    one = StepResult(
        {"loss": 1.0, "tokens": 10.0, "micro_batches": 1.0, "max_ratio": 2.0, "unreplayed": 5.0, "loss_scale": 8.0}
    )
    two = StepResult({"loss": 2.0, "tokens": 14.0, "micro_batches": 2.0, "max_ratio": 1.5, "loss_scale": 4.0})
    assert combine_updates([one, two]).metrics == {
        "loss": 1.5,
        "tokens": 24.0,
        "micro_batches": 3.0,
        "max_ratio": 2.0,
        "unreplayed": 5.0,
        "loss_scale": 4.0,
        "updates": 2.0,
    }
