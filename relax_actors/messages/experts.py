"""Compact storage of each token's experts, recorded for router replay (R3).

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
    """Convert experts for storage: uint8 up to 254 with 255 for unknown, else int16 with -1."""
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
    """Split experts of samples into prompt and completions; equal prompts are stored once.

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


def store_experts(
    recorded: Sequence[tuple[Array | None, int]], prompt_tokens: int
) -> tuple[Array | None, Array | None]:
    """Encode experts of sequences with common prompt tokens, stored once if equal.

    Args:
        recorded: experts of each sequence, `[len - 1, layers, experts_per_token]`, and its leading prompt tokens.
        prompt_tokens: number of tokens of the prompt.

    Returns:
        `[1 or sequences, prompt_tokens - 1, layers, experts_per_token]` of the prompt, and `[total, layers,
        experts_per_token]` for the token before each own token; None and None where a sequence has no experts.
    """
    arrays = [(experts, shared) for experts, shared in recorded if experts is not None]
    if len(arrays) < len(recorded) or not arrays:
        return None, None
    shape = arrays[0][0].shape[1:]
    heads = np.full((len(arrays), max(0, prompt_tokens - 1), *shape), MISSING, np.int16)
    tails = []
    for i, (experts, shared) in enumerate(arrays):
        known = max(0, shared - 1)
        heads[i, :known] = experts[:known]
        tails += [np.full((1, *shape), MISSING, np.int16)] * (shared == 0) + [experts[known:]]
    alike = all(np.array_equal(head, heads[0]) for head in heads[1:])
    return compact(heads[:1] if alike else heads), compact(np.concatenate(tails))


def join_experts(experts: tuple[Array, Array], i: int, shared: int, part: slice) -> Array:
    """Join prompt and own experts of sequence `i`, `[len - 1, layers, experts_per_token] int16`.

    Args:
        experts: of the prompt and of all own tokens, as `store_experts` lays them out, expanded.
        i: number of the sequence.
        shared: leading prompt tokens of the sequence.
        part: place of its own tokens.
    """
    prompts, routed = experts
    own = routed[part] if shared else routed[part][1:]
    return np.concatenate([prompts[min(i, len(prompts) - 1)][: max(0, shared - 1)], own])


def check_experts(prompt: Array | None, routed: Array | None, sizes: tuple[int, int, int]) -> None:
    """Raise ValueError unless both stored arrays match a trajectory, or both are None.

    Args:
        prompt: stored experts of the prompt.
        routed: stored experts of the own tokens.
        sizes: tokens of the prompt, sequences, and own tokens of the trajectory.
    """
    if prompt is None and routed is None:
        return
    if prompt is None or routed is None or {prompt.dtype, routed.dtype} - {np.dtype("u1"), np.dtype("i2")}:
        msg = "prompt_experts and routed_experts of a trajectory must both be uint8 or int16, or both None"
        raise ValueError(msg)
    prompt_tokens, sequences, total = sizes
    shapes = [(rows, max(0, prompt_tokens - 1), *routed.shape[1:]) for rows in (1, sequences)]
    if routed.ndim != 3 or len(routed) != total or prompt.shape not in shapes:  # noqa: PLR2004
        shown = f"{list(prompt.shape)} and {list(routed.shape)}"
        msg = f"experts {shown} do not match {total} tokens of {sequences} sequences"
        raise ValueError(msg)
