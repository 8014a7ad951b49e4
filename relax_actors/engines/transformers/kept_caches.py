"""Keys and values that are kept between the turns of episodes, and batches of caches that are joined."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from relax_actors.engines.transformers.reserved_cache import ReservedLayer


@dataclass(frozen=True, slots=True)
class KeptCache:
    """Keys and values of the leading tokens of a conversation.

    Attributes:
        tokens: `[len] int32`, all tokens of the conversation; the cache lacks the last one.
        version: weights that computed them.
        layers: keys and values `[heads, len - 1, head_dim]` of each layer.
        media: keys of the media that the conversation holds, in order: placeholders alone do not tell them apart.
    """

    tokens: NDArray[Any]
    version: int
    layers: list[tuple[Tensor, Tensor]]
    media: tuple[Hashable, ...] = ()

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""
        return int(self.layers[0][0].shape[-2])

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(tensor.nbytes for pair in self.layers for tensor in pair)


class KeptCaches:
    """Caches of conversations, at most `limit` bytes; the least recently used ones leave first.

    A conversation without a cache is prefilled anew, with the same result up to rounding.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self.nbytes = limit, 0
        self._kept: OrderedDict[str, KeptCache] = OrderedDict()
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, session: str, cache: KeptCache) -> None:
        """Keep the cache of a conversation, in place of an earlier one."""
        self._remove(session)
        if cache.nbytes > self._limit:
            return
        self._kept[session] = cache
        self.nbytes += cache.nbytes
        while self.nbytes > self._limit:
            self._remove(next(iter(self._kept)))

    def take(
        self, session: str, tokens: NDArray[Any], version: int, media: tuple[Hashable, ...] = ()
    ) -> KeptCache | None:
        """Remove and return the cache of a conversation; None if it does not hold the beginning of `tokens`.

        Args:
            session: name of the conversation.
            tokens: `[len] int32`, all tokens to read.
            version: of the weights.
            media: keys of the media of `tokens`.
        """
        cache = self._kept.get(session)
        self._remove(session)
        fits = cache is not None and cache.version == version and len(tokens) > cache.length
        fits = fits and cache is not None and media[: len(cache.media)] == cache.media
        if cache is None or not fits or not np.array_equal(tokens[: cache.length], cache.tokens[: cache.length]):
            self.misses += 1
            return None
        self.hits += 1
        return cache

    def move(self, device: torch.device) -> None:
        """Move all caches to a device."""
        for session, cache in self._kept.items():
            layers = [(keys.to(device), values.to(device)) for keys, values in cache.layers]
            self._kept[session] = replace(cache, layers=layers)

    def clear(self) -> None:
        """Remove all caches."""
        self._kept.clear()
        self.nbytes = 0

    def _remove(self, session: str) -> None:
        if (cache := self._kept.pop(session, None)) is not None:
            self.nbytes -= cache.nbytes


def is_joinable(cache: DynamicCache) -> bool:
    """Whether sequences can be added to a cache: no layer is bounded by a window or recurrent."""
    return all(type(layer) is ReservedLayer for layer in cache.layers)


def cut(cache: DynamicCache, place: int, mask: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Copy the keys and values of one sequence without its padding.

    Args:
        cache: of a batch.
        place: of the sequence in the batch.
        mask: `[tokens]`, 0 for padding.
    """
    kept = mask.bool()
    return [(layer.keys[place][:, kept], layer.values[place][:, kept]) for layer in _layers(cache)]


def fill(cache: DynamicCache, kept: list[KeptCache | None]) -> Tensor:
    """Fill an empty cache with the caches of conversations, padded on the left; return its mask `[batch, tokens]`."""
    present = [one for one in kept if one is not None]
    longest = max(one.length for one in present)
    device = present[0].layers[0][0].device
    mask = torch.zeros((len(kept), longest), dtype=torch.long, device=device)
    for i, one in enumerate(kept):
        if one is not None:
            mask[i, longest - one.length :] = 1
    for layer in range(len(present[0].layers)):
        pair = []
        for side in range(2):
            heads, _, width = present[0].layers[layer][side].shape
            tensor = present[0].layers[layer][side].new_zeros((len(kept), heads, longest, width))
            for i, one in enumerate(kept):
                if one is not None:
                    tensor[i, :, longest - one.length :] = one.layers[layer][side]
            pair.append(tensor)
        cache.update(pair[0], pair[1], layer)
    return mask


def join(cache: DynamicCache, other: DynamicCache, unused: int) -> None:
    """Add the sequences of another cache behind those of `cache`, aligned at their newest tokens.

    Args:
        cache: of the running batch.
        other: of the sequences that join.
        unused: columns on the left of the result that hold nothing but padding.
    """
    for layer, joined in zip(_layers(cache), _layers(other), strict=True):
        layer.replace(*(_joined(getattr(layer, n), getattr(joined, n), unused) for n in ("keys", "values")))


def _layers(cache: DynamicCache) -> list[Any]:
    """Return the layers of a joinable cache, which hold keys and values as soon as the cache has tokens."""
    return list(cache.layers)


def _joined(first: Tensor, second: Tensor, unused: int) -> Tensor:
    length = max(first.shape[-2], second.shape[-2])
    joined = first.new_zeros((len(first) + len(second), first.shape[1], length - unused, first.shape[-1]))
    for rows, tensor in ((slice(0, len(first)), first), (slice(len(first), None), second)):
        own = tensor[..., max(0, unused - (length - tensor.shape[-2])) :, :]
        joined[rows, :, joined.shape[-2] - own.shape[-2] :] = own
    return joined
