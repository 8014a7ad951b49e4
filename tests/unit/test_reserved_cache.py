"""The cache with reserved room holds what a concatenated one holds, and copies a layer rarely."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, MistralConfig
from transformers.cache_utils import DynamicLayer

from relax_actors.engines.transformers.reserved_cache import MIN_RESERVE, ReservedLayer, reserved_cache

LIMIT = 100
steps = st.lists(
    st.tuples(st.just("update"), st.integers(1, 90))
    | st.tuples(st.sampled_from(["repeat", "select"]), st.integers(1, 3)),
    max_size=8,
)


def states(rows: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[rows, heads, tokens, head_dim]`, laid out as attention computes them."""
    drawn = torch.randn(2, rows, tokens, 2, 4, generator=torch.Generator().manual_seed(seed)).transpose(2, 3)
    return drawn[0], drawn[1]


@given(st.integers(1, 3), st.integers(1, 20), steps)
def test_layer_holds_what_a_concatenated_one_holds(rows: int, tokens: int, steps: list[tuple[str, int]]) -> None:
    reserved, plain = ReservedLayer(LIMIT), DynamicLayer()
    for i, (kind, number) in enumerate([("update", tokens), *steps]):
        if kind == "repeat" and rows < 10:
            reserved.batch_repeat_interleave(number)
            plain.batch_repeat_interleave(number)
            rows *= number
        elif kind == "select":
            kept = torch.arange(rows)[::number]
            reserved.batch_select_indices(kept)
            plain.batch_select_indices(kept)
            rows = len(kept)
        elif kind == "update":
            found, expected = (layer.update(*states(rows, number, i)) for layer in (reserved, plain))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert reserved.get_seq_length() == plain.get_seq_length()
        torch.testing.assert_close(reserved.keys, plain.keys, rtol=0, atol=0)
        torch.testing.assert_close(reserved.values, plain.values, rtol=0, atol=0)


def test_layer_is_copied_only_when_its_room_is_used_up_and_reserves_no_more_than_the_limit() -> None:
    layer = ReservedLayer(200)
    layer.update(*states(2, 10, 0))
    places, sizes = set(), set()
    for i in range(190):
        keys, _ = layer.update(*states(2, 1, i))
        places.add(keys.untyped_storage().data_ptr())
        sizes.add(keys.untyped_storage().nbytes() // (2 * 2 * 4 * 4))
    assert layer.get_seq_length() == 200
    assert sizes == {11 + MIN_RESERVE, 11 + MIN_RESERVE + 1 + MIN_RESERVE, 200}
    assert len(places) <= 3


def test_layers_with_a_window_keep_their_own_cache() -> None:
    size = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    assert {type(layer) for layer in reserved_cache(LlamaConfig(**size), 10).layers} == {ReservedLayer}
    windowed = reserved_cache(MistralConfig(**size, sliding_window=4), 10).layers
    assert [layer.is_sliding for layer in windowed] == [True, True]
