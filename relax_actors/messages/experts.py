"""Compact storage of the experts chosen for each token, which a rollout records for router replay (R3).

Engines use `[tokens, moe_layers, experts_per_token] int16`, -1 where unknown. Trajectories store uint8 where possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
MISSING = -1
_MISSING_BYTE = 255


def compact(chosen: Array) -> Array:
    """Convert experts for storage: uint8 with 255 for unknown if no number is above 254, else int16 with -1."""
    if chosen.max(initial=MISSING) >= _MISSING_BYTE:
        return chosen.astype(np.int16)
    return np.where(chosen < 0, _MISSING_BYTE, chosen).astype(np.uint8)


def expand(stored: Array) -> Array:
    """Convert stored experts back to int16 with -1 for unknown; the inverse of `compact`."""
    chosen = stored.astype(np.int16)
    if stored.dtype == np.uint8:
        chosen[stored == _MISSING_BYTE] = MISSING
    return chosen


def split_prompt_experts(samples: Sequence[Array], prompt_tokens: int) -> tuple[Array, Array]:
    """Split the experts of samples of one prompt into prompt and completions; equal prompt parts are stored once.

    Args:
        samples: `[prompt_tokens + len - 1, layers, experts_per_token]` of each sample, in token order.
        prompt_tokens: number of tokens of the prompt.

    Returns:
        `[1 or samples, prompt_tokens - 1, layers, experts_per_token]` for the prompt's tokens but the last, and
        `[total, layers, experts_per_token]` for the token before each generated token; both as `compact` gives them.
    """
    before = prompt_tokens - 1
    first = samples[0][:before]
    same = all(np.array_equal(sample[:before], first) for sample in samples[1:])
    prompt = np.stack([sample[:before] for sample in (samples[:1] if same else samples)])
    return compact(prompt), compact(np.concatenate([sample[before:] for sample in samples]))


def invalid_reason(chosen: Array, experts: int) -> str:
    """Return why no router can have chosen these experts; empty string if they are valid.

    Args:
        chosen: `[..., experts_per_token] int16`, as `expand` gives it.
        experts: number of experts of a layer.
    """
    if not chosen.size:
        return ""
    lowest, highest = int(chosen.min()), int(chosen.max())
    if lowest < MISSING or highest >= experts:
        return f"an expert is not from 0 to {experts - 1}"
    ordered = np.sort(chosen, axis=-1)
    if ((ordered[..., :-1] == ordered[..., 1:]) & (ordered[..., 1:] >= 0)).any():
        return "an expert is chosen twice for one token"
    if lowest < 0 and ((ordered[..., 0] < 0) != (ordered[..., -1] < 0)).any():
        return "a token has only some of its experts"
    return ""
