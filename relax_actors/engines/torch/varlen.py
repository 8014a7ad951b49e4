"""Attention of packed sequences by torch's varlen kernel (FlashAttention), on CUDA in half precision."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from relax_actors.engines.torch.strict_backward import strict_backward

MAX_WIDTH, WIDTH_MULTIPLE = 256, 8
"""Head dimensions that the kernel computes."""
_SETTINGS = inspect.signature(varlen_attn).parameters
"""Keyword arguments of the kernel, which differ between versions of torch: `is_causal` became `window_size`."""


def computing_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype that attention computes in: that of autocast, where it is on."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def can_attend(query: Tensor, window: int | None) -> bool:
    """Return whether the kernel computes the attention of these queries, `[total, heads, dim]`."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and computing_dtype(query) in (torch.float16, torch.bfloat16)
        and width <= MAX_WIDTH
        and width % WIDTH_MULTIPLE == 0
        and (window is None or "window_size" in _SETTINGS)
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: int,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention within each sequence; queries and keys are aligned at the end of a sequence.

    Args:
        query: `[queries, heads, dim]`.
        key: `[keys, key heads, dim]`.
        value: as `key`.
        ends: `[sequences + 1] int32`, cumulative numbers of queries and of keys, starting with 0.
        longest: length of the longest sequence.
        scale: factor of the scores; None for 1 / sqrt(dim).
        window: largest distance to a key, plus 1; None without a sliding window.

    Returns:
        `[queries, heads, dim]`.
    """
    dtype, settings = computing_dtype(query), _settings(query, key, window)
    if scale is not None and "scale" in _SETTINGS:
        settings["scale"] = scale
    elif scale is not None:
        query = query * (scale * query.shape[-1] ** 0.5)

    def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = varlen_attn(query, key, value, ends[0], ends[1], longest, longest, **settings)
        return output if isinstance(output, Tensor) else output[0]

    return strict_backward(compute, query.to(dtype), key.to(dtype), value.to(dtype))


def _settings(query: Tensor, key: Tensor, window: int | None) -> dict[str, Any]:
    """Return the arguments for a causal mask, and for key heads that query heads share."""
    settings: dict[str, Any] = {"is_causal": True}
    if "window_size" in _SETTINGS:
        settings = {"window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in _SETTINGS:
        settings["enable_gqa"] = query.shape[1] != key.shape[1]
    return settings
