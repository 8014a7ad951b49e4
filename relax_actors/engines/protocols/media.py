"""Media of a prompt as engines get them: features, and where their placeholder tokens are.

A sequence's tokens hold one placeholder for each embedding of a medium; the model replaces their embeddings with the
features that its tower computes. Multimodal rotary positions depend on the prompt alone, so they are computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.fields import TensorRef
from relax_actors.messages.media import AUDIO, Kind, Media

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """One image, video or sound of a prompt.

    Attributes:
        kind: one of `KINDS_OF_MEDIA`.
        features: input of the model's tower before normalisation, as the role `media` stored it.
        grid: `[3] int32`, temporal, vertical and horizontal patches; of a sound `[1] int32`, frames.
        start: position of its first placeholder in the expanded prompt.
        tokens: number of its placeholders. Those of a video may be interleaved with other tokens.
        seconds_per_grid: seconds between two temporal patches of a video; 0 for other media.
        reference: reference to `features` in the store, for engines that pass it on; None if there is none.
    """

    kind: Kind
    features: Array
    grid: Array
    start: int
    tokens: int
    seconds_per_grid: float = 0.0
    reference: TensorRef | None = None

    @property
    def visual(self) -> bool:
        """Whether it is an image or a video."""
        return self.kind != AUDIO


@dataclass(frozen=True, slots=True, eq=False)
class PromptMedia:
    """Media and positions of one prompt, shared by all samples of its row.

    A sequence that reads media after its prompt has an object of its own, which `extended` makes; its prompt then ends
    with the last observation that holds media.

    Attributes:
        items: media in the order of their first placeholders; empty for a prompt of text alone.
        positions: `[3, prompt_len]`, temporal, vertical and horizontal rotary positions of the expanded prompt; int32,
            or float32 for models whose videos have fractions of positions (Qwen3-Omni).
        position_delta: what is added to the index of a token after the prompt to get its position, on all three axes.

    Raises:
        ValueError: `positions` has another shape.
    """

    items: tuple[MediaItem, ...]
    positions: Array
    position_delta: float

    def __post_init__(self) -> None:
        if self.positions.ndim != 2 or len(self.positions) != 3:  # noqa: PLR2004 three axes
            msg = f"positions of a prompt with media have shape {list(self.positions.shape)}; they are [3, prompt_len]"
            raise ValueError(msg)

    @classmethod
    def none(cls, dtype: str) -> PromptMedia:
        """Return the media of no tokens, which `extended` begins with where a sequence has no prompt of its row."""
        return cls((), np.zeros((3, 0), dtype), 0.0)

    @property
    def tokens(self) -> int:
        """Number of placeholders of all media, a measure of the work of the towers."""
        return sum(item.tokens for item in self.items)

    def positions_of(self, length: int) -> Array:
        """Return the positions of a sequence of the prompt and what follows it, `[3, length]`, typed as `positions`."""
        prompt = self.positions[:, :length]
        rest = np.arange(prompt.shape[1], length) + self.position_delta
        positions: Array = np.concatenate([prompt, np.broadcast_to(rest, (3, len(rest)))], axis=1).astype(prompt.dtype)
        return positions

    def extended(self, length: int, positions: Array, items: Iterable[MediaItem]) -> PromptMedia:
        """Return the media of a sequence of `length` tokens that goes on with an observation.

        The items of this object are reused, so that engines encode a medium once for all sequences that hold it.
        `positions` `[3, n]` are the rotary positions of the observation's tokens, from which `start` of its `items`
        counts.

        Raises:
            ValueError: the sequence is shorter than its last medium.
        """
        if length < self.positions.shape[1]:
            msg = f"an observation after {length} tokens lies within the {self.positions.shape[1]} that have positions"
            raise ValueError(msg)
        whole = np.concatenate([self.positions_of(length), positions], axis=1).astype(self.positions.dtype)
        added = tuple(replace(item, start=item.start + length) for item in items)
        return PromptMedia((*self.items, *added), whole, _delta(whole))

    def behind(self, old: PromptMedia, new: PromptMedia) -> PromptMedia:
        """Return the media of a sequence whose prompt, with the media `old`, is replaced by one with those of `new`."""
        before, after = old.positions.shape[1], new.positions.shape[1]
        if self is old or self.positions.shape[1] == before:
            return new
        shift = np.array(after + new.position_delta - before - old.position_delta, self.positions.dtype)
        positions = np.concatenate([new.positions, self.positions[:, before:] + shift], axis=1)
        moved = tuple(replace(item, start=item.start + after - before) for item in self.items[len(old.items) :])
        whole = positions.astype(self.positions.dtype)
        return PromptMedia((*new.items, *moved), whole, _delta(whole))

    def prefix(self, tokens: int) -> PromptMedia:
        """Return the media and positions of the prompt's first `tokens` tokens, which end within no medium."""
        if tokens >= self.positions.shape[1]:
            return self
        items = tuple(item for item in self.items if item.start < tokens)
        positions = self.positions[:, :tokens]
        return replace(self, items=items, positions=positions, position_delta=_delta(positions))

    def of_kind(self, kind: Kind) -> list[MediaItem]:
        """Return the items of one kind, in order."""
        return [item for item in self.items if item.kind == kind]


def _delta(positions: Array) -> float:
    """Return what the position of a token after `positions` exceeds its index by."""
    # In the type of the positions, so that the sum of both is rounded as in transformers.
    return float(np.array(positions.max(initial=-1) + 1 - positions.shape[1], positions.dtype))


def media_of(sequences: Iterable[PromptMedia | None]) -> list[PromptMedia]:
    """Return the distinct objects with media of some sequences, in order of their first sequence."""
    by_id = {id(media): media for media in sequences if media is not None and media.items}
    return list(by_id.values())


def placeholders_of(sequences: Iterable[PromptMedia]) -> int:
    """Return the number of placeholders of the distinct media of some sequences."""
    items = {id(item): item for media in sequences for item in media.items}
    return sum(item.tokens for item in items.values())


def items_of(media: Sequence[Media], arrays: Sequence[Array]) -> tuple[MediaItem, ...]:
    """Return the media of a cell, with the arrays of their features, as engines read them."""
    return tuple(
        MediaItem(
            medium.kind,  # type: ignore[arg-type]
            array,
            medium.grid,
            medium.start,
            medium.tokens,
            medium.seconds_per_grid,
            medium.features,
        )
        for medium, array in zip(media, arrays, strict=True)
    )
