"""Where a replay parts from its record: digests of rows, figures, first tensors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from broker.codec import decode_fields, encode, open_envelope
from relax_actors.errors import StoreError
from relax_actors.messages import Advantage, Batch, Trajectory
from relax_actors.replay.difference import (
    changed_cell,
    compare_figures,
    first_micro_batch,
    first_tensor,
    micro_batches_of,
)
from relax_actors.replay.steps import Replay
from relax_actors.training.metric_of_step import micro_batch_figures
from relax_actors.training.row_digests import digest_of, digests_of
from relax_actors.weights.files import Fingerprint

ADVANTAGE = Advantage(np.array([0.5, -0.5], np.float32), 0.25, components={"style": 0.5, "answer": 1.0})


def trajectory() -> Trajectory:
    return Trajectory(
        np.array([1, 2, 3], np.int32),
        np.array([2, 3], np.int32),
        np.array([1, 2, 3, 4, 5], np.int32),
        np.full(5, -1.0, np.float32),
        np.zeros(5, np.int32),
        ["a", "b"],
        ["stop", "stop"],
    )


def test_digest_follows_from_the_content_alone() -> None:
    one, other = (decode_fields(open_envelope(encode(ADVANTAGE, author)), Advantage) for author in ("a.0#1", "a.3#7"))
    assert digest_of(one) == digest_of(other) == digest_of(ADVANTAGE)
    reordered = replace(ADVANTAGE, components={"answer": 1.0, "style": 0.5})
    assert digest_of(reordered) == digest_of(ADVANTAGE)


@pytest.mark.parametrize(
    "change",
    [
        {"values": np.array([0.5, -0.50000006], np.float32)},
        {"values": np.array([0.5, -0.5], np.float64)},
        {"reward": 0.25000000000000006},
        {"components": {"style": 0.5, "answer": 1.0, "more": 0.0}},
        {"correct": np.array([True, False])},
    ],
)
def test_digest_differs_for_the_smallest_change(change: dict[str, object]) -> None:
    assert digest_of(replace(ADVANTAGE, **change)) != digest_of(ADVANTAGE)  # type: ignore[arg-type]


def test_first_micro_batch_with_another_figure_is_found() -> None:
    computed = {"tokens": [4.0, 6.0], "loss": [0.5, 0.25]}
    same = micro_batches_of(computed | {"gradient": [1.0, 2.0]}, computed)
    assert [sorted(part) for part in same] == [["loss", "tokens"]] * 2
    assert first_micro_batch(same) is None
    assert first_micro_batch(micro_batches_of({"tokens": [4.0, 6.0], "loss": [0.5, 0.26]}, computed)) == (1, "loss")
    # Lists of an earlier version, or of a message that another program has written, are no record.
    for recorded in ({}, {"loss": [0.5]}, {"loss": "0.7", "tokens": [None, "6"]}):
        assert first_micro_batch(micro_batches_of(recorded, computed)) is None


def test_figures_of_micro_batches_without_a_record_are_neither_equal_nor_different() -> None:
    parts = micro_batches_of({"loss": [0.5]}, {"loss": [0.5], "gradient": [1.0]})
    (shown,) = Replay("policy", 0, micro_batches=parts, rows=[["group.0.1"]]).json()["micro_batches"]
    assert shown["loss"] == {"recorded": 0.5, "computed": 0.5, "equal": True}
    assert shown["gradient"] == {"recorded": None, "computed": 1.0, "equal": None}


def test_figures_of_micro_batches_are_means_over_their_tokens() -> None:
    one = {"tokens": 4.0, "loss": 2.0, "gradient": 3.0, "samples": 2.0}
    parts = [one, {"tokens": 0.0, "loss": 0.0, "gradient": 3.0}]
    assert micro_batch_figures(parts) == {"tokens": [4.0, 0.0], "loss": [0.5, 0.0], "gradient": [3.0, 3.0]}
    assert micro_batch_figures([]) == {}
    assert len(micro_batch_figures(parts * 300)["loss"]) == 64


def test_rows_of_the_data_have_no_digest_of_advantages() -> None:
    columns = {"trajectory": trajectory(), "advantage": ADVANTAGE}
    assert digests_of(columns).keys() == columns.keys()
    assert digests_of(columns, from_data=True) == {"trajectory": digest_of(trajectory())}
    assert digests_of({"trajectory": StoreError("lost")}) == {"trajectory": 0}


def test_first_changed_cell_is_that_of_the_first_row() -> None:
    recorded = {"trajectory": [1, 2, 3], "advantage": [4, 5, 6]}
    assert changed_cell(recorded, recorded, 3) is None
    assert changed_cell(recorded, {"trajectory": [1, 2, 9], "advantage": [4, 9, 6]}, 3) == (1, "advantage")
    assert changed_cell({}, recorded, 3) is None


def test_digests_of_a_batch_survive_their_cell() -> None:
    batch = Batch([0, 5], 7, 1, 0.5, 0, 12, 1.0, {"trajectory": [1, 0xFFFFFFFF]})
    data = encode(batch, "trainer.0#1", subject="relax.a.batch.3")
    assert decode_fields(open_envelope(data, subject="relax.a.batch.3"), Batch) == batch


def test_figures_are_compared_without_times() -> None:
    recorded = {"step": 3, "kind": "step", "loss": 0.5, "train_seconds": 2.0, "old": 1.0, "nan": float("nan")}
    found = compare_figures(recorded, {"step": 3, "loss": 0.25, "train_seconds": 1.0, "nan": float("nan")})
    assert {name: figure.equal for name, figure in found.items()} == {"loss": False, "nan": True, "old": False}
    assert found["old"].json() == {"recorded": 1.0, "computed": None, "equal": False}


def test_figures_that_a_process_measures_in_some_steps_only_are_not_compared() -> None:
    measured = {"loss": 0.5, "unreplayed_abs_delta": 0.1, "unreplayed_k3": 0.2}
    assert compare_figures(measured, {"loss": 0.5}).keys() == {"loss"}
    assert compare_figures({"loss": 0.5}, measured).keys() == {"loss"}


def test_first_tensor_that_differs_is_named_by_its_number() -> None:
    def prefixes(changed: int | None) -> bytes:
        fingerprint = Fingerprint()
        for number in range(5):
            fingerprint.add(f"w{number}", torch.full((3,), 1.5 if number == changed else 1.0))
        return fingerprint.prefixes

    for changed in range(5):
        assert first_tensor(prefixes(None), prefixes(changed)) == changed
    assert first_tensor(prefixes(None), prefixes(None)) is None
    assert first_tensor(b"", prefixes(2)) is None
