"""Random tokens that depend on a seed and a distribution alone, not on the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.engines.protocols.inference import GenerationRequest


def uniforms_of(request: GenerationRequest, width: int) -> NDArray[Any]:
    """Draw `[samples, width] float64` in [0, 1) from the seed alone; zeros from `max_tokens`."""
    generator = np.random.Generator(np.random.Philox(key=request.seed))
    drawn = generator.random((request.samples, request.max_tokens))
    return np.pad(drawn, ((0, 0), (0, width - request.max_tokens)))


def choose(logprobs: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """Sample by inverting the cumulative distribution.

    Args:
        logprobs: `[batch, vocab]`.
        top_p: `[batch, 1]`.
        uniforms: `[batch] float64` in [0, 1).

    Returns:
        Token ids, `[batch]`.
    """
    probs = logprobs.double().exp()
    if bool((top_p < 1).any()):
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        # Smallest set that reaches top_p: keep a token if the more likely ones do not reach it yet.
        ordered = ordered * (ordered.cumsum(-1) - ordered < top_p)
        probs = torch.zeros_like(probs).scatter(1, order, ordered)
    cumulative = probs.cumsum(-1)
    index = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(-1)
    # A uniform close to 1 can step past the last token because of rounding.
    last = probs.shape[1] - 1 - (probs > 0).flip(-1).byte().argmax(-1)
    return torch.minimum(index, last)
