"""Micro-batches of a step for each data-parallel rank.

They follow from sequence lengths and layout alone. A micro-batch is packed: sequences are concatenated in one row, so
that linear layers compute no padding. With context parallelism, where ranks share each sequence, sequences are rows
that are padded on the right instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.micro_batches import Shared, micro_batches
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore.batch_media import MicroBatchMedia
from relax_actors.engines.protocols.samples import MicroBatchPlan, TrainSample, input_lengths, shared_work
from relax_actors.engines.ranks.shares import share_out
from relax_actors.engines.torch.experts import pack_experts
from relax_actors.engines.torch.packing import Packing
from relax_actors.media.family import Family


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Plan of a micro-batch: the sequences of `indices`, laid out as `[rows, length]`.

    A packed micro-batch has one row, with padding after the last sequence; each sequence lacks the first `shared`
    tokens, which its predecessor has, too. Otherwise each sequence has a row, and further rows are padding.
    """

    indices: list[int]
    rows: int
    length: int
    packed: bool = True
    shared: list[int] = field(default_factory=list)


def plan_micro_batches(
    samples: Sequence[TrainSample],
    layout: Layout,
    max_tokens: int,
    *,
    share_prefixes: bool,
    keeps_rows: bool = False,
) -> list[list[MicroBatch]]:
    """Micro-batches of each data-parallel rank.

    All ranks get the same number, padded with empty ones: ranks that share experts or a pipeline wait for each other in
    every micro-batch.

    Args:
        samples: sequences of the step.
        layout: of the ranks.
        max_tokens: largest number of tokens of a micro-batch.
        share_prefixes: whether a prefix that sequences of a row share counts once, without context parallelism.
        keeps_rows: whether one rank of data parallelism computes all sequences of a row.
    """
    lengths, packed = input_lengths(samples), layout.context == 1
    shares = share_out(samples, layout.data, share_prefixes=share_prefixes and packed, keeps_rows=keeps_rows)
    cuts = []
    for share in shares:
        own = [samples[i] for i in share]
        work = shared_work(own, share_prefixes=share_prefixes and packed)
        parts = _cut(input_lengths(own), layout, max_tokens, max(lengths), work)
        cuts.append([_micro_batch(lengths, share, MicroBatchPlan.of(part, work), layout) for part in parts])
    count = max(map(len, cuts))
    if layout.virtual > 1:  # the interleaved schedule takes a multiple of the pipeline stages
        count = -(-count // layout.pipeline) * layout.pipeline
    empty = MicroBatch([], 1, layout.length_multiple, packed)
    plans = [plan + [empty] * (count - len(plan)) for plan in cuts]
    if layout.virtual == 1:
        return plans
    # Virtual stages do not exchange the shapes of their activations, so all micro-batches have one shape.
    rows = max(batch.rows for plan in plans for batch in plan)
    length = max(batch.length for plan in plans for batch in plan)
    return [[MicroBatch(batch.indices, rows, length, packed, batch.shared) for batch in plan] for plan in plans]


def _cut(lengths: list[int], layout: Layout, max_tokens: int, longest: int, shared: Shared | None) -> list[list[int]]:
    """Micro-batches within the budget, as positions in a rank's share; with one padded shape all have one length."""
    packed = layout.context == 1
    sizes = lengths if packed or layout.virtual == 1 else [longest] * len(lengths)
    return micro_batches(sizes, max_tokens=max_tokens, padded=not packed, shared=shared)


def _micro_batch(lengths: Sequence[int], share: Sequence[int], plan: MicroBatchPlan, layout: Layout) -> MicroBatch:
    indices, packed, multiple = [share[i] for i in plan.indices], layout.context == 1, layout.length_multiple
    selected = [lengths[i] for i in indices]
    least = sum(selected) - sum(plan.shared) if packed else max(selected)
    return MicroBatch(indices, 1 if packed else len(indices), -(-least // multiple) * multiple, packed, plan.shared)


@dataclass(frozen=True, slots=True)
class MicroBatchTensors:
    """Tensors of a micro-batch on the device.

    Losses use the trained tokens of each sequence, without the tokens between them, padded to `[sequences, width]`.

    Attributes:
        tokens: `[rows, length] int64`.
        scored: `[trained] int64`, index in `rows * length` of the token where the model is read for each trained token.
        targets: `[trained] int64`, the trained tokens.
        mask: `[sequences, width] bool`, true for trained tokens, false for padding.
        packing: of a packed micro-batch.
        experts: `[rows, length, layers, experts_per_token] int64`, experts to replay, -1 for the router's own choice;
            None if no experts were recorded for these sequences.
        media: positions and media of a multimodal model.
    """

    tokens: Tensor
    scored: Tensor
    targets: Tensor
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
        packing = _packing(batch, input_lengths(selected), device)
        rows = [np.arange(sample.inputs) + row * batch.length for row, sample in enumerate(selected)]
        paths = rows if packing is None else packing.paths[: len(selected)]
        tokens = np.zeros(batch.rows * batch.length, np.int64)
        mask = np.zeros((len(selected), max([1, *(sample.trained for sample in selected)])), np.bool_)
        scored, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for row, (sample, path) in enumerate(zip(selected, paths, strict=True)):
            tokens[path] = sample.token_ids[: len(path)]
            trained = np.flatnonzero(sample.loss_mask)
            scored.append(path[trained - sample.lag])
            targets.append(sample.token_ids[trained])
            mask[row, : len(trained)] = True
        arrays = [tokens.reshape(batch.rows, -1), np.concatenate(scored), np.concatenate(targets).astype(np.int64)]
        on = [torch.from_numpy(array).to(device) for array in (*arrays, mask)]
        experts = _experts(selected, paths, batch)
        return cls(
            on[0],
            on[1],
            on[2],
            on[3],
            packing,
            None if experts is None else torch.from_numpy(experts).to(device),
            None if family is None else MicroBatchMedia.of(family, selected, paths, (batch.rows, batch.length), device),
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


def _packing(batch: MicroBatch, lengths: Sequence[int], device: torch.device) -> Packing | None:
    """Packing of the sequences; padding after the last sequence counts as one more."""
    if not batch.packed:
        return None
    shared = [*batch.shared] if batch.shared else [0] * len(lengths)
    padding = batch.length - sum(lengths) + sum(shared)
    return Packing.of([*lengths, padding], device, [*shared, 0]) if padding else Packing.of(lengths, device, shared)


def _experts(samples: Sequence[TrainSample], paths: Sequence[NDArray[Any]], batch: MicroBatch) -> NDArray[Any] | None:
    """Recorded experts of the tokens, -1 where there are none; None if none were recorded."""
    recorded = [
        (path, sample.routed_experts)
        for sample, path in zip(samples, paths, strict=True)
        if sample.routed_experts is not None
    ]
    if not recorded:
        return None
    packed = pack_experts([e for _, e in recorded], [path for path, _ in recorded], batch.rows * batch.length)
    by_token = packed.swapaxes(0, 1)
    return np.ascontiguousarray(by_token).reshape(batch.rows, batch.length, *by_token.shape[1:])
