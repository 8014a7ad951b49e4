"""The experts that a model chose for each token: what a rollout records for the trainer to replay (R3), in few bytes.

Engines give and take `[tokens, moe_layers, experts_of_token] int16`, -1 where it is not known; trajectories keep uint8.
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
    """As it is kept: uint8 with 255 for a missing expert if no number is above 254, else int16 with -1."""
    if chosen.max(initial=MISSING) >= _MISSING_BYTE:
        return chosen.astype(np.int16)
    return np.where(chosen < 0, _MISSING_BYTE, chosen).astype(np.uint8)


def expanded(kept: Array) -> Array:
    """Undoes `compact`."""
    chosen = kept.astype(np.int16)
    if kept.dtype == np.uint8:
        chosen[kept == _MISSING_BYTE] = MISSING
    return chosen


def shared_prompt(samples: Sequence[Array], prompt_tokens: int) -> tuple[Array, Array]:
    """What samples of one prompt chose, with the prompt's part once if it is one for all.

    Args:
        samples: each `[prompt_tokens + len - 1, layers, experts_of_token]`, in the order of the tokens read.
        prompt_tokens: of the prompt.

    Returns:
        `[1 or samples, prompt_tokens - 1, layers, experts_of_token]` of the prompt's tokens but the last, and
        `[total, layers, experts_of_token]` of the token before each generated one; both compact.
    """
    before = prompt_tokens - 1
    first = samples[0][:before]
    same = all(np.array_equal(sample[:before], first) for sample in samples[1:])
    prompt = np.stack([sample[:before] for sample in (samples[:1] if same else samples)])
    return compact(prompt), compact(np.concatenate([sample[before:] for sample in samples]))


def flaw(chosen: Array, experts: int) -> str:
    """Why no router of so many experts can have chosen this; empty if it can.

    Args:
        chosen: `[..., experts_of_token] int16`, as `expanded` gives it.
        experts: of a layer.
    """
    if not chosen.size:
        return ""
    least, most = int(chosen.min()), int(chosen.max())
    if least < MISSING or most >= experts:
        return f"an expert is not from 0 to {experts - 1}"
    ordered = np.sort(chosen, axis=-1)
    if ((ordered[..., :-1] == ordered[..., 1:]) & (ordered[..., 1:] >= 0)).any():
        return "an expert is chosen twice for one token"
    if least < 0 and ((ordered[..., 0] < 0) != (ordered[..., -1] < 0)).any():
        return "a token has some of its experts only"
    return ""
