"""Sequence packing: sequences are concatenated, so only attention computes on padding.

Linear layers get `[1, total]` tokens, in which a prefix that sequences share stands once. On CUDA in half precision
attention takes them as they are (`varlen`). Elsewhere it unpacks them to padded rows: a sequence that shares nothing
attends to itself, where a causal mask suffices, and the own tokens of any other sequence attend to the whole sequence.
Tokens of an image that attend to each other, also to later ones, are a block of their sequence and need a mask, too.
Works for models that use the `AttentionInterface` of transformers; sequences of recurrent models are not packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from relax_actors.engines.torch import varlen
from relax_actors.engines.torch.attention_rows import Array, Rows
from relax_actors.errors import ConfigError

ATTENTION = "packed"
"""Attention name for `PreTrainedModel.set_attn_implementation`; the model is then called with `packing=`."""
CALL_SCORES, MAX_MASK = 1 << 14, 1 << 24
"""Scores that take as long as a call of the kernel, and most scores of a call with a mask: 64 MiB in float32."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Layout of concatenated sequences, each without the prefix that it shares with its predecessor.

    Attributes:
        paths: `[len] int64` of each sequence, index of its tokens among the packed ones; on the CPU.
        positions: `[1, total] int64`, position of each token in its sequence.
        longest: length of the longest sequence.
        ends: `[sequences + 1] int32`, cumulative numbers of own tokens, starting with 0.
        keys: `[sum of lengths] int64`, `paths` end to end; None if no sequence shares a prefix.
        key_ends: `[sequences + 1] int32`, cumulative lengths, starting with 0.
        calls: rows of each call of the attention kernel.
        order: `[total] int64`, index of each token among the queries of all calls; None if there is one call.
        has_blocks: whether tokens attend to later ones of their block.
    """

    paths: list[Array]
    positions: Tensor
    longest: int
    ends: Tensor
    keys: Tensor | None
    key_ends: Tensor
    calls: list[Rows]
    order: Tensor | None
    has_blocks: bool = False

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        shared: Sequence[int] | None = None,
        blocks: Sequence[Array] | None = None,
    ) -> Packing:
        """Build the packing of sequences.

        Args:
            lengths: tokens of each sequence.
            device: device of the tensors.
            shared: leading tokens that each has in common with its predecessor; none by default. They end within no
                block.
            blocks: `[len] int64` of each, the number of the block in which its tokens attend to each other, or -1;
                attention is causal by default.
        """
        shared = [0] * len(lengths) if shared is None else shared
        own = np.array(lengths) - shared
        ends, key_ends = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (own, lengths))
        paths: list[Array] = []
        for begin, end, prefix in zip(ends[:-1].tolist(), ends[1:].tolist(), shared, strict=True):
            path = np.arange(begin, end)
            paths.append(np.concatenate([paths[-1][:prefix], path]) if prefix else path)
        positions = np.concatenate([np.arange(p, length) for p, length in zip(shared, lengths, strict=True)])
        on = [torch.from_numpy(array).to(device) for array in (positions, ends, key_ends)]
        keys = torch.from_numpy(np.concatenate(paths)).to(device) if any(shared) else None
        has_blocks = blocks is not None and any(bool((block >= 0).any()) for block in blocks)
        calls, order = _calls(paths, shared, device, blocks if has_blocks else None)
        return cls(paths, on[0][None], max(lengths), on[1], keys, on[2], calls, order, has_blocks)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention within each sequence, causal but for its blocks.

        Args:
            query: `[total, heads, dim]`.
            key: the same, with the number of key heads.
            value: as `key`.
            scale: factor of the scores; None for 1 / sqrt(dim).
            window: largest distance to a key, plus 1; None without a sliding window.
            sinks: `[heads]`, score of a key without value that every query attends to; None without.

        Returns:
            `[total, heads, dim]`.
        """
        # The kernel takes one width; values of latent attention have another.
        is_plain = sinks is None and not self.has_blocks and value.shape[-1] == query.shape[-1]
        if is_plain and varlen.can_attend(query, window):
            if self.keys is not None:
                key, value = key.index_select(0, self.keys), value.index_select(0, self.keys)
            ends = self.ends, self.key_ends
            return varlen.attend(query, key, value, ends, self.longest, scale=scale, window=window)
        outputs = []
        for rows in self.calls:
            queries, keys, values = rows.unpack(query), rows.unpack_keys(key), rows.unpack_keys(value)
            outputs.append(rows.pack(attend_rows(queries, keys, values, rows.within(window), scale, sinks)))
        return outputs[0] if self.order is None else torch.cat(outputs).index_select(0, self.order)


def _calls(
    paths: Sequence[Array], shared: Sequence[int], device: torch.device, blocks: Sequence[Array] | None
) -> tuple[list[Rows], Tensor | None]:
    """Lay out the calls of the attention kernel, and the order of the packed tokens among their queries."""
    if not any(shared) and blocks is None:
        return [Rows.whole([len(path) for path in paths], None, device)], None
    calls, queries = list[Rows](), list[Array]()
    whole = [i for i, prefix in enumerate(shared) if not prefix and blocks is None]
    if whole:
        queries.append(np.concatenate([paths[i] for i in whole]))
        calls.append(Rows.whole([len(paths[i]) for i in whole], queries[0], device))
    rest = [i for i, prefix in enumerate(shared) if (prefix or blocks is not None) and prefix < len(paths[i])]
    for group in cut_calls([(len(paths[i]) - shared[i], len(paths[i])) for i in rest]):
        members = [rest[n] for n in group]
        own = None if blocks is None else [blocks[i] for i in members]
        calls.append(Rows.masked([paths[i] for i in members], [shared[i] for i in members], device, own))
        queries += [paths[i][shared[i] :] for i in members]
    return calls, torch.from_numpy(np.argsort(np.concatenate(queries))).to(device)


def cut_calls(shapes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Cut rows, by their numbers of queries and keys, into calls of the attention kernel with little padding.

    A row joins the current call if its padding there costs less than a call of its own, the largest rows first. Returns
    indices into `shapes`, one list for each call.
    """
    calls: list[list[int]] = []
    queries = keys = 0
    for i in sorted(range(len(shapes)), key=lambda i: (-shapes[i][0] * shapes[i][1], i)):
        own, whole = shapes[i]
        wider, longer = max(queries, own), max(keys, whole)
        joined = wider * longer * (len(calls[-1]) + 1) if calls else 0
        alone = queries * keys * len(calls[-1]) + own * whole + CALL_SCORES if calls else 0
        if not calls or joined > min(alone, MAX_MASK):
            calls.append([i])
            queries, keys = own, whole
        else:
            calls[-1].append(i)
            queries, keys = wider, longer
    return calls


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of rows by torch's SDPA.

    Args:
        query: `[rows, heads, length, dim]`.
        key: the same, with the number of key heads.
        value: as `key`.
        mask: as `Rows.mask`.
        scale: factor of the scores; None for 1 / sqrt(dim).
        sinks: as in `Packing.attend`.

    Returns:
        `[rows, length, heads, dim]`.
    """
    if sinks is not None:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        query, key, value, mask = _with_sinks(query, key, value, mask, sinks / scale)
    grouped, causal = query.shape[1] != key.shape[1], mask is None
    if grouped and query.is_cuda and (mask is not None or query.dtype == torch.float32):
        # Only the kernel that keeps all scores in memory has key heads of groups there.
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        grouped = False
    attended = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return attended.transpose(1, 2)


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add a first key without value, whose product with the queries of a head is that of `sinks`, `[heads]`.

    Another dimension makes the product: queries hold it there, the new key holds 1, all others 0.
    """
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    products = sinks.to(query.dtype)[None, :, None, None].expand(*query.shape[:3], 1)
    unit = torch.cat([key.new_zeros(*key.shape[:2], 1, key.shape[3]), key.new_ones(*key.shape[:2], 1, 1)], -1)
    keys = torch.cat([unit, functional.pad(key, (0, 1))], 2)
    return (
        torch.cat([query, products], -1),
        keys,
        functional.pad(value, (0, 0, 1, 0)),
        functional.pad(mask, (1, 0), value=True),
    )


def is_recurrent(model: PreTrainedModel) -> bool:
    """Whether layers of a model pass a state from token to token, which no attention mask bounds."""
    layers = DynamicCache(config=model.config.get_text_config()).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def packed_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each packed sequence; arguments as transformers' attention functions.

    Raises:
        ConfigError: the model's attention has a softcap, which SDPA cannot compute.
    """
    del attention_mask
    if settings.get("softcap") is not None:
        kind = type(module).__name__
        msg = f"{kind} needs softcap, which the torch engine's attention lacks; choose another model"
        raise ConfigError(msg)
    packed = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return packing.attend(*packed, scale=scaling, window=sliding_window, sinks=s_aux)[None], None


def _no_mask(**_: Any) -> None:
    """Build no mask; `packed_attention_forward` makes its own."""


AttentionInterface.register(ATTENTION, packed_attention_forward)
AttentionMaskInterface.register(ATTENTION, _no_mask)
