"""Which rank encodes which media, and where their embeddings are afterwards; follows from the media alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from relax_actors.engines.protocols.media import MediaItem, PromptMedia
from relax_actors.engines.torch.towers import Encoded, in_tower_order

Group: TypeAlias = tuple[list[list[MediaItem]], Tensor]
"""Works that are encoded together, and the rows `[n] int64` of their features in the part of a rank."""


@dataclass(frozen=True, slots=True)
class Features:
    """Sizes of what towers compute.

    Attributes:
        hidden: width of an embedding.
        deepstack: layers that images and videos give features for besides their embeddings.
    """

    hidden: int
    deepstack: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """First rows of an item in the parts of all ranks, one after the other: of its embeddings, and of each layer."""

    embeddings: int
    deepstack: tuple[int, ...]


class TowerShares:
    """Shares of the towers' work.

    The part of a rank is `[longest, hidden]`: the embeddings of its works, then the features of each deepstack layer
    for its images and videos, then padding.

    Args:
        parts: works of each rank; see `engines.torch.towers.works_of`.
        features: sizes of what the towers compute.

    Attributes:
        longest: rows of the part of a rank.
    """

    def __init__(self, parts: Sequence[list[list[MediaItem]]], features: Features) -> None:
        self._parts, self._layers = parts, features.deepstack
        items = [[item for work in works for item in work] for works in parts]
        visual = [sum(item.tokens for item in own if item.visual) for own in items]
        sizes = [sum(item.tokens for item in own) for own in items]
        self.longest = max(size + self._layers * seen for size, seen in zip(sizes, visual, strict=True))
        self._places: dict[int, _Place] = {}
        for rank, own in enumerate(items):
            row = rank * self.longest
            layer = row + sizes[rank]
            for item in own:
                layers = tuple(layer + number * visual[rank] for number in range(self._layers)) if item.visual else ()
                self._places[id(item)] = _Place(row, layers)
                row += item.tokens
                layer += item.tokens if item.visual else 0

    @classmethod
    def of(cls, works: Sequence[list[MediaItem]], ranks: int, features: Features) -> TowerShares:
        """Deal works out, the largest first, each to the rank with the least to do; each rank keeps their order."""
        sizes = [sum(item.tokens for item in work) for work in works]
        loads, shares = [0] * ranks, [list[int]() for _ in range(ranks)]
        for number in sorted(range(len(works)), key=lambda n: (-sizes[n], n)):
            rank = loads.index(min(loads))
            loads[rank] += sizes[number]
            shares[rank].append(number)
        return cls([[works[number] for number in sorted(share)] for share in shares], features)

    def groups(self, rank: int, most: int | None = None) -> Iterator[Group]:
        """Yield the works of a rank in order, as many at once as have at most `most` embeddings, all by default.

        A work with more is alone. Each group comes with the rows `[n] int64` of its features in the rank's part.
        """
        group: list[list[MediaItem]] = []
        size = 0
        for work in self._parts[rank]:
            own = sum(item.tokens for item in work)
            if group and most is not None and size + own > most:
                yield group, self._rows(group, rank)
                group, size = [], 0
            group.append(work)
            size += own
        if group:
            yield group, self._rows(group, rank)

    def _rows(self, works: Sequence[Sequence[MediaItem]], rank: int) -> Tensor:
        """Rows of the embeddings of works, then of the features of each layer, in the part of a rank."""
        items = [item for work in works for item in work]
        whole = torch.cat([self._embeddings(items), *(self._features(items, n) for n in range(self._layers))])
        return whole - rank * self.longest

    def _embeddings(self, items: Sequence[MediaItem]) -> Tensor:
        return _ranges([(self._places[id(item)].embeddings, item.tokens) for item in items])

    def _features(self, items: Sequence[MediaItem], layer: int) -> Tensor:
        return _ranges([(self._places[id(item)].deepstack[layer], item.tokens) for item in items if item.visual])

    def select(self, whole: Tensor, media: Sequence[PromptMedia], dtype: torch.dtype | None = None) -> Encoded:
        """Select the embeddings of some of the media.

        Args:
            whole: `[ranks * longest, hidden]`, the parts of all ranks.
            media: media of some prompts.
            dtype: of the embeddings; that of `whole` by default.
        """
        items = in_tower_order(media)
        layers = range(self._layers if any(item.visual for item in items) else 0)
        embeddings, *deepstack = (
            whole.index_select(0, rows.to(whole.device)).to(dtype or whole.dtype)
            for rows in (self._embeddings(items), *(self._features(items, layer) for layer in layers))
        )
        return Encoded(embeddings, tuple(deepstack))


def _ranges(ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Numbers of ranges given by first number and length, one after the other, `[n] int64`."""
    return torch.cat([torch.arange(0), *(torch.arange(first, first + length) for first, length in ranges)])
