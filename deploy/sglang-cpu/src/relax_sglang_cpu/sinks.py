"""Attention sinks of gpt-oss in SGLang's attention backend `torch_native`, which has none.

A sink is the score of a key without value, one for each head, that every query attends to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from relax_sglang_cpu.on_import import change

_sinks: list[Tensor] = []
"""Those of the layer that computes now, `[heads]`; empty for other layers."""


def install(backend: str) -> None:
    """Give the backend of that name sinks, and let SGLang take it for gpt-oss."""

    def accept(module: Any) -> None:
        backends = module.attention_backends_of
        module.attention_backends_of = lambda view: tuple(
            "triton" if name == backend else name for name in backends(view)
        )

    change("sglang.srt.arg_groups.model_hook", accept)
    change("sglang.srt.layers.attention.torch_native_backend", _add_sinks)


def _add_sinks(module: Any) -> None:
    module.scaled_dot_product_attention = attend
    for name in ("forward_extend", "forward_decode"):
        forward = getattr(module.TorchNativeAttnBackend, name)
        setattr(module.TorchNativeAttnBackend, name, _with_sinks(forward))


def _with_sinks(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*arguments: Any, sinks: Tensor | None = None, **settings: Any) -> Tensor:
        _sinks[:] = [] if sinks is None else [sinks]
        try:
            return forward(*arguments, **settings)
        finally:
            _sinks.clear()

    return run


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    scale: float,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention, with sinks where the layer has them; arguments and result as torch's function."""
    if not _sinks:
        return scaled_dot_product_attention(
            query, key, value, attn_mask, scale=scale, is_causal=is_causal, enable_gqa=enable_gqa
        )
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    sinks = _sinks[0].to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return weights @ value.repeat_interleave(groups, 1)
