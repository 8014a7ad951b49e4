"""Attention of the sampling loop to padded sequences: query heads that share a key head are computed together.

With padding the attention of transformers copies the whole cache for every token, once for each query head of a key
head. Without padding it does not, and is left as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "grouped"
"""Attention name for `PreTrainedModel.set_attn_implementation`."""


def attend_by_groups(decoder: PreTrainedModel) -> None:
    """Make a decoder on the CPU use this attention in place of SDPA.

    A decoder with another attention keeps it: transformers gives models with softcaps or sinks its own.
    """
    current = decoder.config._attn_implementation  # noqa: SLF001 transformers has no other name for it
    if decoder.device.type == "cpu" and current == "sdpa":
        decoder.set_attn_implementation(NAME)


def grouped_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute attention; arguments and result as transformers' attention functions.

    The query heads of a key head become the queries of a single head, which is exact for one token per sequence, where
    all of them see the same keys. Several tokens per sequence and sequences without padding are left to transformers.

    Args:
        module: layer of the model.
        query: `[batch, heads, tokens, dim]`.
        key: the same, with the number of key heads, and of tokens so far.
        value: as `key`.
        attention_mask: `[batch, 1, tokens, tokens so far] bool`; None without padding.
        scaling: factor of the scores; None for 1 / sqrt(dim).
        settings: further arguments of transformers.

    Returns:
        `[batch, tokens, heads, dim]`, and None for the weights.
    """
    batch, heads, tokens, width = query.shape
    ungrouped = attention_mask is None or tokens > 1 or heads == key.shape[1]
    if ungrouped or settings.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
    grouped = query.reshape(batch, key.shape[1], -1, width)
    attended = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return attended.reshape(batch, 1, heads, -1), None


AttentionInterface.register(NAME, grouped_attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
