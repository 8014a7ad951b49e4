"""Rotary positions and media of a lockstep batch of a multimodal model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.engines.protocols.inference import GenerationRequest
from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.engines.torch.multimodal import Placement
from relax_actors.engines.transformers.lockstep_batch import LockstepBatch
from relax_actors.media.family import Family

Part: TypeAlias = tuple[NDArray[Any], PromptMedia | None]
"""Tokens of a sequence, or of its end, and their media."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a model reads the tokens of a forward pass.

    Attributes:
        mask: `[batch, tokens]` of all tokens so far, 0 for padding.
        positions: `[batch, new]` of the new tokens, or `[3, batch, new]` of a multimodal model.
        placement: places of media among the new tokens; None without media.
    """

    mask: Tensor
    positions: Tensor
    placement: Placement | None = None


class BatchMedia:
    """Media of the requests of a lockstep batch."""

    def __init__(self, family: Family, requests: Sequence[GenerationRequest], device: torch.device) -> None:
        self._family, self._requests, self._device = family, requests, device
        self._dtype = torch.float32 if family.position_dtype == "float32" else torch.long
        deltas = [0.0 if r.media is None else r.media.position_delta for r in requests]
        self._deltas = torch.tensor(deltas, dtype=self._dtype, device=device)

    def reading(self, mask: Tensor, owners: Sequence[int]) -> Reading:
        """Return how to read whole sequences: prompts, and what was generated so far.

        Args:
            mask: `[batch, tokens]`, 0 for the padding on the left.
            owners: request of each sequence.
        """
        width, lengths = mask.shape[1], mask.sum(-1).tolist()
        positions = np.zeros((3, len(owners), width))
        for row, (owner, length) in enumerate(zip(owners, lengths, strict=True)):
            media = self._requests[owner].media
            positions[:, row, width - length :] = np.arange(length) if media is None else media.positions_of(length)
        sequences = [(self._requests[owner].tokens, self._requests[owner].media) for owner in owners]
        paths = [(row + 1) * width + np.arange(-length, 0) for row, length in enumerate(lengths)]
        placement = Placement.of(self._family, sequences, paths, self._device)
        return Reading(mask, torch.from_numpy(positions).to(self._device, self._dtype), placement)

    def reading_behind(self, mask: Tensor, width: int, lengths: Sequence[int]) -> Reading:
        """Return how to read what follows the caches of the requests, which have one sample each.

        Args:
            mask: `[batch, tokens]` of all tokens, 0 for padding.
            width: columns of the new tokens, padded on the left.
            lengths: tokens in the cache of each request.
        """
        positions, sequences, paths = np.zeros((3, len(lengths), width)), list[Part](), []
        for row, (request, length) in enumerate(zip(self._requests, lengths, strict=True)):
            tokens, media = request.tokens, request.media
            whole = np.broadcast_to(np.arange(len(tokens)), (3, len(tokens)))
            whole = whole if media is None else media.positions_of(len(tokens))
            paths.append((row + 1) * width + np.arange(length - len(tokens), 0))
            positions[:, row, width - (len(tokens) - length) :] = whole[:, length:]
            sequences.append((tokens[length:], None if media is None else behind(media, length)))
        placement = Placement.of(self._family, sequences, paths, self._device)
        return Reading(mask, torch.from_numpy(positions).to(self._device, self._dtype), placement)

    def next_positions(self, batch: LockstepBatch) -> Tensor:
        """Return the positions of the newest token of each sample in the batch, `[3, batch, 1]`."""
        owners = torch.from_numpy(batch.owners).to(self._device)
        return (batch.positions + self._deltas[owners])[None, :, None].expand(3, -1, -1)


def behind(media: PromptMedia, length: int) -> PromptMedia:
    """Return the media of the tokens behind the first `length` ones, which end within no medium."""
    items = tuple(item for item in media.items if item.start >= length)
    return replace(media, items=items, positions=media.positions[:, length:])


def media_keys(media: PromptMedia | None) -> tuple[Hashable, ...]:
    """Return what tells the media of a sequence apart from those of another one with the same tokens."""
    items = () if media is None else media.items
    return tuple((item.start, item.reference or id(item.features)) for item in items)
