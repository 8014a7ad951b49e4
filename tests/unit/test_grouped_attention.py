"""Query heads that share a key head are attended together, with the results of transformers' attention."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from relax_actors.engines.protocols import GenerationRequest
from relax_actors.engines.torch.model import build
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.engines.transformers.grouped_attention import grouped_attention_forward
from tests.support.models import QWEN3, config_of


class Layer(torch.nn.Module):
    """What transformers' attention reads of a layer."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9), st.integers(0, 4))
def test_equals_the_attention_of_transformers(
    dtype: torch.dtype,
    tolerance: float,
    batch: int,
    key_heads: int,
    groups: int,
    tokens: int,
    before: int,
    padding: int,
) -> None:
    torch.manual_seed(before)
    length = before + tokens
    query = torch.randn(batch, key_heads * groups, tokens, 8, dtype=dtype)
    key, value = torch.randn(2, batch, key_heads, length, 8, dtype=dtype)
    mask = torch.ones(tokens, length, dtype=torch.bool).tril(before).expand(batch, 1, -1, -1).clone()
    padding = min(padding, before)
    mask[0, ..., :padding] = False
    arguments: dict[str, Any] = {"attention_mask": mask if padding or tokens > 1 else None, "scaling": 0.3}
    expected, _ = sdpa_attention_forward(Layer(groups), query, key, value, **arguments)
    attended, _ = grouped_attention_forward(Layer(groups), query, key, value, **arguments)
    torch.testing.assert_close(attended, expected, rtol=tolerance, atol=tolerance)


GROUPED = QWEN3 | {"num_attention_heads": 4, "num_key_value_heads": 2}
WINDOWS = {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}


def engine_of(folder: Path, architecture: dict[str, Any]) -> TransformersEngine:
    """Build an engine with random weights."""
    path = config_of(folder / "run", architecture).model_path
    build(path, seed=1).save_pretrained(path)
    engine = TransformersEngine(path)
    engine.freeze(path)
    return engine


def requests_of(lengths: tuple[int, ...]) -> list[GenerationRequest]:
    """Ask for two samples of four tokens of each prompt."""
    prompts = [np.arange(n, dtype=np.int32) for n in lengths]
    return [GenerationRequest(p, i, 2, 1.0, 1.0, 4, frozenset()) for i, p in enumerate(prompts)]


class AttentionKeys(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the shapes `[batch, heads, tokens, dim]` of the keys that calls of attention get."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in str(func):
            self.shapes.append(args[1].shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths", [(5, 5), (3, 5)], ids=["equal prompts", "padded prompts"])
def test_engine_does_not_copy_the_cache_for_a_token(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    engine = engine_of(tmp_path, GROUPED)
    with AttentionKeys() as keys:
        engine.generate(requests_of(lengths), lambda: None)
    assert {heads for _, heads, tokens, _ in keys.shapes if tokens > max(lengths)} == {2}


@pytest.mark.parametrize("more", [{}, WINDOWS], ids=["full attention", "windows"])
def test_padded_prompts_get_the_samples_of_transformers_attention(tmp_path: Path, more: dict[str, Any]) -> None:
    engine, requests = engine_of(tmp_path, GROUPED | more), requests_of((3, 7))
    samples = [*chain(*engine.generate(requests, lambda: None))]
    engine.model.set_attn_implementation("sdpa")
    for own, expected in zip(samples, chain(*engine.generate(requests, lambda: None)), strict=True):
        assert own.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(own.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
