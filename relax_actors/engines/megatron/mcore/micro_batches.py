"""Micro-batches of a step for each data-parallel rank.

They follow from sequence lengths and layout alone. A micro-batch is packed: sequences are concatenated in one row, so
that linear layers compute no padding. With context parallelism, where ranks share each sequence, sequences are rows
that are padded on the right instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.micro_batches import Shared, micro_batches
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore.batch_media import MicroBatchMedia
from relax_actors.engines.protocols.samples import TrainSample, lengths_of
from relax_actors.engines.torch.packing import Packing
from relax_actors.media.family import Family
from relax_actors.messages.experts import MISSING


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Plan of a micro-batch: the sequences of `indices`, laid out as `[rows, length]`.

    A packed micro-batch has one row, with padding after the last sequence. Otherwise each sequence has a row, and
    further rows are padding.
    """

    indices: list[int]
    rows: int
    length: int
    packed: bool = True


def plan_micro_batches(
    lengths: Sequence[int], layout: Layout, max_tokens: int, shared: Shared | None = None
) -> list[list[MicroBatch]]:
    """Micro-batches of each data-parallel rank.

    All ranks get the same number, padded with empty ones: ranks that share experts or a pipeline wait for each other in
    every micro-batch.

    Args:
        lengths: tokens of each sequence.
        layout: of the ranks.
        max_tokens: largest number of tokens of a micro-batch.
        shared: media of prompts, which the sequences of a prompt share if they are on the same rank.
    """
    shares = _shares(lengths, layout.data) if shared is None else _grouped_shares(lengths, layout.data, shared)
    packed = layout.context == 1
    if shared is None:
        cuts = [_cut([lengths[i] for i in share], layout, max_tokens, max(lengths)) for share in shares]
    else:
        cuts = [_grouped_cut(lengths, share, max_tokens, shared) for share in shares]
    count = max(map(len, cuts))
    if layout.virtual > 1:  # the interleaved schedule takes a multiple of the pipeline stages
        count = -(-count // layout.pipeline) * layout.pipeline
    groups = [[[share[i] for i in group] for group in cut] for share, cut in zip(shares, cuts, strict=True)]
    multiple = layout.length_multiple
    plans = [[_micro_batch(lengths, indices, multiple, packed=packed) for indices in cut] for cut in groups]
    empty = MicroBatch([], 1, multiple, packed)
    padded = [plan + [empty] * (count - len(plan)) for plan in plans]
    if layout.virtual == 1:
        return padded
    # Virtual stages do not exchange the shapes of their activations, so all micro-batches have one shape.
    rows = max(batch.rows for plan in padded for batch in plan)
    length = max(batch.length for plan in padded for batch in plan)
    return [[MicroBatch(batch.indices, rows, length, packed) for batch in plan] for plan in padded]


def _shares(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Sequences of each data-parallel rank, longest first."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for position, index in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))):
        # Alternate the direction, so that the rank with the longest sequence of a round gets the shortest of the next.
        rank, reverse = position % ranks, (position // ranks) % 2
        shares[ranks - 1 - rank if reverse else rank].append(index)
    return shares


def _grouped_shares(lengths: Sequence[int], ranks: int, shared: Shared) -> list[list[int]]:
    """Sequences of each data-parallel rank; each group goes to the rank with the least work, the largest group first.

    A step of fewer groups than ranks splits its groups, and their media are encoded on more than one rank.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(shared.groups):
        members.setdefault(group, []).append(index)
    if len(members) < ranks:
        return _shares(lengths, ranks)
    work = {group: shared.tokens.get(group, 0) + sum(lengths[i] for i in own) for group, own in members.items()}
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for group in sorted(members, key=lambda group: (-work[group], members[group][0])):
        rank = loads.index(min(loads))
        shares[rank] += members[group]
        loads[rank] += work[group]
    return shares


def _grouped_cut(lengths: Sequence[int], share: Sequence[int], max_tokens: int, shared: Shared) -> list[list[int]]:
    """Micro-batches of a rank within the budget, as positions in its share."""
    own = Shared([shared.groups[i] for i in share], shared.tokens)
    return micro_batches([lengths[i] for i in share], max_tokens=max_tokens, shared=own)


def _cut(lengths: list[int], layout: Layout, max_tokens: int, longest: int) -> list[list[int]]:
    """Micro-batches within the budget; with one padded shape all sequences have one length."""
    packed = layout.context == 1
    sizes = lengths if packed or layout.virtual == 1 else [longest] * len(lengths)
    return micro_batches(sizes, max_tokens=max_tokens, padded=not packed)


def _micro_batch(lengths: Sequence[int], indices: list[int], multiple: int, *, packed: bool) -> MicroBatch:
    selected = [lengths[i] for i in indices]
    least = sum(selected) if packed else max(selected)
    return MicroBatch(indices, 1 if packed else len(indices), -(-least // multiple) * multiple, packed)


@dataclass(frozen=True, slots=True)
class MicroBatchTensors:
    """Tensors of a micro-batch on the device.

    Losses use the trained tokens of each sequence, without the tokens between them, padded to `[sequences, width]`.

    Attributes:
        tokens: `[rows, length] int64`.
        targets: `[rows, length] int64`, the token after each token.
        scored: `[rows, length] bool`, true for tokens before a trained token.
        positions: `[sequences, width] int64`, index in `rows * length` of the token before each trained token.
        mask: `[sequences, width] bool`, true where `positions` belongs to a trained token.
        packing: of a packed micro-batch.
        experts: `[rows, length, layers, experts_per_token] int64`, experts to replay, -1 for the router's own choice;
            None if no experts were recorded for these sequences.
        media: positions and media of a multimodal model.
    """

    tokens: Tensor
    targets: Tensor
    scored: Tensor
    positions: Tensor
    mask: Tensor
    packing: Packing | None = None
    experts: Tensor | None = None
    media: MicroBatchMedia | None = None

    @property
    def width(self) -> int:
        """Largest number of trained tokens of a sequence, at least 1."""
        return self.mask.shape[1]

    @classmethod
    def of(
        cls, batch: MicroBatch, samples: Sequence[TrainSample], device: torch.device, family: Family | None = None
    ) -> MicroBatchTensors:
        """Lay out the sequences of a micro-batch; its indices select from `samples`.

        `family` is that of a multimodal model.
        """
        selected = [samples[index] for index in batch.indices]
        starts = _starts(batch, lengths_of(selected))
        shape = batch.rows, batch.length
        tokens, scored = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
        width = max([1, *(sample.trained for sample in selected)])
        positions, mask = np.zeros((len(selected), width), np.int64), np.zeros((len(selected), width), np.bool_)
        for row, (sample, start) in enumerate(zip(selected, starts, strict=True)):
            tokens.reshape(-1)[start : start + len(sample)] = sample.token_ids
            before = np.flatnonzero(sample.loss_mask) - 1 + start
            positions[row, : len(before)] = before
            mask[row, : len(before)] = True
        scored.reshape(-1)[positions[mask]] = True
        targets = np.roll(tokens.reshape(-1), -1).reshape(shape)
        tensors = [torch.from_numpy(array).to(device) for array in (tokens, targets, scored, positions, mask)]
        experts = _experts(batch, selected, starts)
        return cls(
            tensors[0],
            tensors[1],
            tensors[2],
            tensors[3],
            tensors[4],
            _packing(batch, lengths_of(selected), device),
            None if experts is None else torch.from_numpy(experts).to(device),
            None if family is None else MicroBatchMedia.of(family, selected, starts, batch.length, device),
        )

    def padded(self, arrays: Sequence[NDArray[Any]]) -> Tensor:
        """Pad values of the trained tokens of each sequence with 0; an empty micro-batch has none.

        Args:
            arrays: `[trained]` or `[trained, k]` of each sequence, numbers or token ids.

        Returns:
            `[sequences, width]` or `[sequences, width, k]`, float32 or, for ids, int64.
        """
        like = arrays[0] if arrays else np.zeros(0, np.float32)
        out = np.zeros((*self.mask.shape, *like.shape[1:]), np.int64 if like.dtype.kind == "i" else np.float32)
        for row, array in enumerate(arrays):
            out[row, : len(array)] = array
        return torch.from_numpy(out).to(self.mask.device)


def _starts(batch: MicroBatch, lengths: Sequence[int]) -> list[int]:
    """Index in `rows * length` of each sequence's first token."""
    if batch.packed:
        return list(accumulate(lengths, initial=0))[:-1]
    return [row * batch.length for row in range(len(lengths))]


def _packing(batch: MicroBatch, lengths: Sequence[int], device: torch.device) -> Packing | None:
    """Packing of the sequences; padding after the last sequence counts as one more."""
    if not batch.packed:
        return None
    padding = batch.length - sum(lengths)
    return Packing.of([*lengths, padding] if padding else lengths, device)


def _experts(batch: MicroBatch, samples: Sequence[TrainSample], starts: Sequence[int]) -> NDArray[Any] | None:
    """Recorded experts of the tokens, -1 where there are none; None if none were recorded."""
    recorded = [
        (start, sample.routed_experts)
        for sample, start in zip(samples, starts, strict=True)
        if sample.routed_experts is not None
    ]
    if not recorded:
        return None
    out = np.full((batch.rows * batch.length, *recorded[0][1].shape[1:]), MISSING, np.int64)
    for start, experts in recorded:
        out[start : start + len(experts)] = experts
    return out.reshape(batch.rows, batch.length, *out.shape[1:])
