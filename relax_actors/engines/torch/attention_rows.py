"""Packed sequences as padded rows, for a kernel of attention that computes rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences that a call of the attention kernel computes as rows, padded on the right.

    Attributes:
        tokens: `[queries] int64`, index among the packed tokens of each query; None if the queries are all tokens.
        places: `[queries] int64`, index of each query in the padded layout `[rows * width]`.
        width: largest number of queries of a row.
        rows: number of rows.
        keys: `[rows * keys_width] int64`, index among the packed tokens of each key, any index for padding; None if the
            keys are the queries.
        before: `[rows or 1] int64`, number of keys before the first query of each row; None without such keys.
        mask: `[rows or 1, 1, width, keys_width] bool`, keys of each query; None for a causal mask.
        block: `[rows, 1, width, keys_width] bool`, keys in the block of each query; None without blocks.
    """

    tokens: Tensor | None
    places: Tensor
    width: int
    rows: int
    keys: Tensor | None = None
    before: Tensor | None = None
    mask: Tensor | None = None
    block: Tensor | None = None

    @classmethod
    def whole(cls, lengths: Sequence[int], tokens: Array | None, device: torch.device) -> Rows:
        """Lay out sequences that share nothing; `tokens` as in the attribute."""
        width = max(lengths)
        places = np.concatenate([np.arange(length) + row * width for row, length in enumerate(lengths)])
        on = None if tokens is None else torch.from_numpy(tokens).to(device)
        return cls(on, torch.from_numpy(places).to(device), width, len(lengths))

    @classmethod
    def masked(
        cls, paths: Sequence[Array], shared: Sequence[int], device: torch.device, blocks: Sequence[Array] | None = None
    ) -> Rows:
        """Lay out sequences whose first tokens another sequence holds, or that have blocks.

        Args:
            paths: `[len] int64` of each sequence, index of its tokens among the packed ones.
            shared: number of first tokens of each that another sequence holds.
            device: device of the tensors.
            blocks: `[len] int64` of each, the block of its tokens, or -1; None if no sequence has any.
        """
        own = [path[prefix:] for path, prefix in zip(paths, shared, strict=True)]
        width, keys_width = max(map(len, own)), max(map(len, paths))
        places = np.concatenate([np.arange(len(part)) + row * width for row, part in enumerate(own)])
        keys = np.zeros((len(paths), keys_width), np.int64)
        for row, path in enumerate(paths):
            keys[row, : len(path)] = path
        before = np.array(shared[:1] if len(set(shared)) == 1 else shared, np.int64)
        on = [torch.from_numpy(a).to(device) for a in (np.concatenate(own), places, keys.reshape(-1), before)]
        rows = cls(on[0], on[1], width, len(paths), on[2], on[3])
        if blocks is None:
            return replace(rows, mask=rows.distance() >= 0)
        of_queries, of_keys = np.full((len(paths), width), -1), np.full((len(paths), keys_width), -1)
        for row, (block, prefix) in enumerate(zip(blocks, shared, strict=True)):
            of_queries[row, : len(block) - prefix], of_keys[row, : len(block)] = block[prefix:], block
        together = (of_queries[:, :, None] == of_keys[:, None]) & (of_keys >= 0)[:, None]
        seen = torch.from_numpy(together[:, None]).to(device)
        return replace(rows, mask=(rows.distance() >= 0) | seen, block=seen)

    def distance(self) -> Tensor:
        """Return how far each query is behind each key, `[rows or 1, 1, width, keys_width] int64`."""
        keys_width = self.width if self.keys is None else len(self.keys) // self.rows
        query = torch.arange(self.width, device=self.places.device)[:, None]
        distances = query - torch.arange(keys_width, device=self.places.device)
        return distances[None, None] if self.before is None else distances + self.before[:, None, None, None]

    def within(self, window: int | None) -> Tensor | None:
        """Return the mask of a sliding window, or that of full attention."""
        keys_width = self.width if self.keys is None else len(self.keys) // self.rows
        if window is None or window >= keys_width:
            return self.mask
        distance = self.distance()
        seen = distance >= 0 if self.block is None else (distance >= 0) | self.block
        return seen & (distance < window)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the queries of `[total, heads, dim]` as `[rows, heads, width, dim]`, padded with zeros."""
        tokens = padded = packed if self.tokens is None else packed.index_select(0, self.tokens)
        if not self._is_dense:
            padded = tokens.new_zeros(self.rows * self.width, *tokens.shape[1:]).index_copy(0, self.places, tokens)
        return padded.view(self.rows, self.width, *tokens.shape[1:]).transpose(1, 2)

    def unpack_keys(self, packed: Tensor) -> Tensor:
        """Return the keys or values of `[total, heads, dim]` as `[rows, heads, keys_width, dim]`."""
        if self.keys is None:
            return self.unpack(packed)
        return packed.index_select(0, self.keys).view(self.rows, -1, *packed.shape[1:]).transpose(1, 2)

    def pack(self, padded: Tensor) -> Tensor:
        """Return the outputs `[rows, width, heads, dim]` of the queries alone, `[queries, heads, dim]`."""
        tokens = padded.reshape(self.rows * self.width, *padded.shape[2:])
        return tokens if self._is_dense else tokens.index_select(0, self.places)

    @property
    def _is_dense(self) -> bool:
        return len(self.places) == self.rows * self.width
