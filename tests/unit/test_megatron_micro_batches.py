"""Plan and tensors of micro-batches: every sequence once, and the same number of micro-batches on all ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.engines.protocols import TrainSample
from tests.support.tiny_megatron import skip_if_missing

skip_if_missing()

import torch  # noqa: E402

from relax_actors.config.training import MegatronSection  # noqa: E402
from relax_actors.engines.megatron.layout import Layout  # noqa: E402
from relax_actors.engines.megatron.mcore.micro_batches import MicroBatch, MicroBatchTensors, plan_micro_batches  # noqa: E402

BUDGET = 64
LAYOUTS = [
    {"ranks": 3},
    {"ranks": 8, "tensor_parallel": 2, "sequence_parallel": True},
    {"ranks": 8, "context_parallel": 2, "pipeline_parallel": 2},
    {"ranks": 4, "pipeline_parallel": 2, "virtual_pipeline": 2},
]


def of_lengths(lengths: list[int]) -> list[TrainSample]:
    return [TrainSample(np.arange(n, dtype=np.int32), np.arange(n) > 0, row=i) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("section", LAYOUTS, ids=str)
@given(lengths=st.lists(st.integers(2, BUDGET), min_size=1, max_size=40))
def test_every_sequence_is_in_exactly_one_micro_batch(section: dict[str, int], lengths: list[int]) -> None:
    layout = Layout.of(MegatronSection(**section))
    shares = plan_micro_batches(of_lengths(lengths), layout, BUDGET, share_prefixes=False)
    assert len(shares) == layout.data
    assert sorted(i for share in shares for batch in share for i in batch.indices) == list(range(len(lengths)))
    assert len({len(share) for share in shares}) == 1
    batches = [batch for share in shares for batch in share]
    for batch in batches:
        assert batch.length % layout.length_multiple == 0
        assert batch.packed == (layout.context == 1)
        if batch.packed:
            assert batch.rows == 1
            assert sum(lengths[i] - 1 for i in batch.indices) <= batch.length
        else:
            assert len(batch.indices) <= batch.rows
            assert all(lengths[i] - 1 <= batch.length for i in batch.indices)
        # Only rounding the length up to the multiple may exceed the budget.
        assert batch.rows * (batch.length - layout.length_multiple) < BUDGET
    if layout.virtual > 1:
        assert len({(batch.rows, batch.length) for batch in batches}) == 1
        assert len(shares[0]) % layout.pipeline == 0


def test_data_parallel_ranks_get_similar_numbers_of_tokens() -> None:
    lengths = list(range(10, 50))
    shares = plan_micro_batches(of_lengths(lengths), Layout.of(MegatronSection(ranks=4)), 100, share_prefixes=False)
    tokens = [sum(lengths[i] for batch in share for i in batch.indices) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths)


def samples(*, experts: bool = False) -> list[TrainSample]:
    """One trained token after a prompt; three trained tokens after a prompt; trained tokens with a hole."""
    pairs = [([7], [4]), ([5, 6], [1, 2, 3])]
    found = [TrainSample.of_completion(np.array(p, np.int32), np.array(c, np.int32)) for p, c in pairs]
    found.append(TrainSample(np.array([8, 9, 10, 11], np.int32), np.array([False, True, False, True])))
    if not experts:
        return found
    return [
        replace(sample, routed_experts=np.full((len(sample) - 1, 1, 2), number, np.int16))
        for number, sample in enumerate(found)
    ]


def test_padded_sequences_are_rows_with_positions_before_their_trained_tokens() -> None:
    found = MicroBatchTensors.of(MicroBatch([0, 1, 2], 4, 6, packed=False), samples(), torch.device("cpu"))
    assert found.tokens.tolist() == [[7, 0, 0, 0, 0, 0], [5, 6, 1, 2, 0, 0], [8, 9, 10, 0, 0, 0], [0] * 6]
    assert found.scored.tolist() == [0, 7, 8, 9, 12, 14]
    assert found.targets.tolist() == [4, 1, 2, 3, 9, 11]
    assert found.mask.int().tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 0]]
    assert found.packing is None


def test_packed_sequences_are_concatenated() -> None:
    found = MicroBatchTensors.of(MicroBatch([1, 0, 2], 1, 9), samples(experts=True), torch.device("cpu"))
    assert found.tokens.tolist() == [[5, 6, 1, 2, 7, 8, 9, 10, 0]]
    assert found.scored.tolist() == [1, 2, 3, 4, 5, 7]
    assert found.targets.tolist() == [1, 2, 3, 4, 9, 11]
    assert found.mask.int().tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert found.experts is not None
    assert found.experts[0, :, 0, 0].tolist() == [1, 1, 1, 1, 0, 2, 2, 2, -1]
    assert found.packing is not None
    assert found.packing.ends.tolist() == [0, 4, 5, 8, 9]
    assert found.packing.positions.tolist() == [[0, 1, 2, 3, 0, 0, 1, 2, 0]]


def test_sequences_without_recorded_experts_leave_the_choice_to_the_router() -> None:
    mixed = samples(experts=True)
    mixed[1] = replace(mixed[1], routed_experts=None)
    found = MicroBatchTensors.of(MicroBatch([1, 0], 1, 6), mixed, torch.device("cpu"))
    assert found.experts is not None
    assert found.experts[0, :, 0, 0].tolist() == [-1, -1, -1, -1, 0, -1]
    assert MicroBatchTensors.of(MicroBatch([1], 1, 4), mixed, torch.device("cpu")).experts is None


def test_empty_micro_batch_has_no_sequences() -> None:
    empty = MicroBatchTensors.of(MicroBatch([], 1, 2), samples(), torch.device("cpu"))
    assert empty.mask.shape == (0, 1)
    assert len(empty.scored) == len(empty.targets) == 0


def test_values_are_padded_like_the_trained_tokens() -> None:
    found = MicroBatchTensors.of(MicroBatch([1, 2], 1, 9), samples(), torch.device("cpu"))
    values = [sample.masked("token_ids") for sample in samples()[1:]]
    assert found.padded(values).tolist() == [[1, 2, 3], [9, 11, 0]]
