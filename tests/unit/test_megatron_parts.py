"""Who computes which sequences: every one once, and all ranks the same number of micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from relax_actors.engines.protocols import Sequences
from tests.support.tiny_megatron import skip_if_missing

skip_if_missing()

import torch  # noqa: E402

from relax_actors.config.training import MegatronSection  # noqa: E402
from relax_actors.engines.megatron.layout import Layout  # noqa: E402
from relax_actors.engines.megatron.mcore.parts import Part, PartTensors, parts_of  # noqa: E402

BUDGET = 64
LAYOUTS = [
    {"ranks": 3},
    {"ranks": 8, "tensor_parallel": 2, "sequence_parallel": True},
    {"ranks": 8, "context_parallel": 2, "pipeline_parallel": 2},
    {"ranks": 4, "pipeline_parallel": 2, "virtual_pipeline": 2},
]


@pytest.mark.parametrize("section", LAYOUTS, ids=str)
@given(lengths=some.lists(some.integers(2, BUDGET), min_size=1, max_size=40))
def test_every_sequence_is_computed_once(section: dict[str, int], lengths: list[int]) -> None:
    layout = Layout.of(MegatronSection(**section))
    shares = parts_of(lengths, layout, BUDGET)
    assert len(shares) == layout.data
    assert sorted(i for share in shares for part in share for i in part.indices) == list(range(len(lengths)))
    assert len({len(share) for share in shares}) == 1
    parts = [part for share in shares for part in share]
    for part in parts:
        assert part.length % layout.multiple == 0
        assert part.packed == (layout.context == 1)
        if part.packed:
            assert part.rows == 1
            assert sum(lengths[i] for i in part.indices) <= part.length
        else:
            assert len(part.indices) <= part.rows
            assert all(lengths[i] <= part.length for i in part.indices)
        # Only what lengths must be a multiple of may go beyond the budget.
        assert part.rows * (part.length - layout.multiple) < BUDGET
    if layout.virtual > 1:
        assert len({(part.rows, part.length) for part in parts}) == 1
        assert len(shares[0]) % layout.pipeline == 0


def test_ranks_of_data_parallelism_get_about_the_same() -> None:
    lengths = list(range(10, 50))
    shares = parts_of(lengths, Layout.of(MegatronSection(ranks=4)), 100)
    tokens = [sum(lengths[i] for part in share for i in part.indices) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths)


def test_a_sequence_is_laid_out_with_the_places_that_score_it() -> None:
    sequences = Sequences(
        [np.array([5, 6], np.int32), np.array([7], np.int32)], [np.array([1, 2, 3], np.int32), np.array([4], np.int32)]
    )
    found = PartTensors.of(Part([1, 0], 3, 6, packed=False), sequences, torch.device("cpu"))
    assert found.tokens.tolist() == [[7, 4, 0, 0, 0, 0], [5, 6, 1, 2, 3, 0], [0] * 6]
    assert found.scored.int().tolist() == [[1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0] * 6]
    assert found.targets[found.scored].tolist() == [4, 1, 2, 3]
    assert found.places.tolist() == [[0, 0, 0], [7, 8, 9], [0, 0, 0]]
    assert found.mask.int().tolist() == [[1, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert found.packing is None


def test_packed_sequences_lie_end_to_end() -> None:
    experts = [np.full((4, 1, 2), 7, np.int16), np.full((1, 1, 2), 8, np.int16)]
    sequences = Sequences(
        [np.array([5, 6], np.int32), np.array([7], np.int32)],
        [np.array([1, 2, 3], np.int32), np.array([4], np.int32)],
        experts,
    )
    found = PartTensors.of(Part([0, 1], 1, 8), sequences, torch.device("cpu"))
    assert found.tokens.tolist() == [[5, 6, 1, 2, 3, 7, 4, 0]]
    assert found.scored.int().tolist() == [[0, 1, 1, 1, 0, 1, 0, 0]]
    assert found.targets[found.scored].tolist() == [1, 2, 3, 4]
    assert found.places.tolist() == [[1, 2, 3], [5, 0, 0]]
    assert found.mask.int().tolist() == [[1, 1, 1], [1, 0, 0]]
    assert found.experts is not None
    assert found.experts[0, :, 0, 0].tolist() == [7, 7, 7, 7, -1, 8, -1, -1]
    assert found.packing is not None
    assert found.packing.ends.tolist() == [0, 5, 7, 8]
    assert found.packing.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0]]
    empty = PartTensors.of(Part([], 1, 2), sequences, torch.device("cpu"))
    assert empty.mask.tolist() == [[False]]
    assert not empty.scored.any()
