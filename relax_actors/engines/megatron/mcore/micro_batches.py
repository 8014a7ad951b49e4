"""Micro-batches of a step for each data-parallel rank, derived from sequence lengths and layout alone.

A micro-batch is packed: sequences are concatenated in one row, so that linear layers compute no padding. With context
parallelism, where ranks share each sequence, sequences are rows that are padded on the right instead.
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

from relax_actors.algorithms.micro_batches import micro_batches
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.protocols.sequences import Sequences
from relax_actors.engines.torch.packing import Packing
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


def plan_micro_batches(lengths: Sequence[int], layout: Layout, token_budget: int) -> list[list[MicroBatch]]:
    """Micro-batches of each data-parallel rank.

    All ranks get the same number, padded with empty ones: ranks that share experts or a pipeline wait for each other in
    every micro-batch.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(layout.data)]
    for position, index in enumerate(order):
        # Alternate the direction, so that the rank with the longest sequence of a round gets the shortest of the next.
        rank, reverse = position % layout.data, (position // layout.data) % 2
        shares[layout.data - 1 - rank if reverse else rank].append(index)
    packed = layout.context == 1
    cuts = [_cut([lengths[i] for i in share], layout, token_budget, max(lengths)) for share in shares]
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


def _cut(lengths: list[int], layout: Layout, token_budget: int, longest: int) -> list[list[int]]:
    """Micro-batches within the budget; where all have one padded shape, each sequence counts as the longest."""
    packed = layout.context == 1
    sizes = lengths if packed or layout.virtual == 1 else [longest] * len(lengths)
    return micro_batches(sizes, token_budget=token_budget, padded=not packed)


def _micro_batch(lengths: Sequence[int], indices: list[int], multiple: int, *, packed: bool) -> MicroBatch:
    selected = [lengths[i] for i in indices]
    least = sum(selected) if packed else max(selected)
    return MicroBatch(indices, 1 if packed else len(indices), -(-least // multiple) * multiple, packed)


@dataclass(frozen=True, slots=True)
class MicroBatchTensors:
    """Tensors of a micro-batch on the device.

    `tokens [rows, length] int64`; `targets [rows, length] int64`, the next token of each; `scored [rows, length] bool`,
    whether the next token is a completion token; `positions [sequences, width] int64`, index in `rows * length` of the
    token before each completion token; `mask [sequences, width] bool`, which of `positions` are used, with at least one
    sequence; `packing` of a packed micro-batch; `experts [rows, length, layers, experts_per_token] int64` to replay, -1
    for the router's own choice, if experts were recorded.
    """

    tokens: Tensor
    targets: Tensor
    scored: Tensor
    positions: Tensor
    mask: Tensor
    packing: Packing | None = None
    experts: Tensor | None = None

    @property
    def width(self) -> int:
        """Number of tokens of the longest completion, at least 1."""
        return self.mask.shape[1]

    @classmethod
    def of(cls, batch: MicroBatch, sequences: Sequences, device: torch.device) -> MicroBatchTensors:
        """Lay out the sequences of a micro-batch."""
        lengths = [len(sequences.prompts[i]) + len(sequences.completions[i]) for i in batch.indices]
        starts = _starts(batch, lengths)
        width = max([1, *(len(sequences.completions[i]) for i in batch.indices)])
        rows = max(batch.rows, len(batch.indices))
        tokens = np.zeros(batch.rows * batch.length, np.int64)
        scored = np.zeros(batch.rows * batch.length, np.bool_)
        positions = np.zeros((rows, width), np.int64)
        mask = np.zeros((rows, width), np.bool_)
        for row, (index, start) in enumerate(zip(batch.indices, starts, strict=True)):
            prompt, completion = sequences.prompts[index], sequences.completions[index]
            first, end = start + len(prompt), start + len(prompt) + len(completion)
            tokens[start:first], tokens[first:end] = prompt, completion
            scored[first - 1 : end - 1] = True
            positions[row, : len(completion)] = np.arange(first - 1, end - 1)
            mask[row, : len(completion)] = True
        shape = batch.rows, batch.length
        arrays = (tokens.reshape(shape), np.roll(tokens, -1).reshape(shape), scored.reshape(shape), positions, mask)
        tensors = [torch.from_numpy(array).to(device) for array in arrays]
        packing = None
        if batch.packed:
            padding = batch.length - sum(lengths)
            packing = Packing.of([*lengths, padding] if padding else lengths, device)
        experts = None
        if sequences.experts is not None:
            experts = torch.from_numpy(_experts(batch, starts, sequences.experts)).to(device)
        return cls(tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], packing, experts)


def _starts(batch: MicroBatch, lengths: Sequence[int]) -> list[int]:
    """Index in `rows * length` of each sequence's first token."""
    if batch.packed:
        return list(accumulate(lengths, initial=0))[:-1]
    return [row * batch.length for row in range(len(lengths))]


def _experts(batch: MicroBatch, starts: Sequence[int], recorded: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Recorded experts of a micro-batch's tokens; -1 for padding and for the last token of each sequence."""
    out = np.full((batch.rows * batch.length, *recorded[0].shape[1:]), MISSING, np.int64)
    for index, start in zip(batch.indices, starts, strict=True):
        out[start : start + len(recorded[index])] = recorded[index]
    return out.reshape(batch.rows, batch.length, *out.shape[1:])
