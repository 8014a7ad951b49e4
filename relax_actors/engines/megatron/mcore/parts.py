"""A step's sequences as the micro-batches of each rank: who computes what follows from lengths and layout alone.

A micro-batch is packed: sequences lie end to end in one row, so that linear layers compute on no padding. With context
parallelism, where ranks share each sequence, it is padded on the right instead.
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
class Part:
    """A micro-batch of the sequences of `indices`, `[rows, length]`.

    If packed it has one row, with padding behind the last sequence; else a row for each sequence, and rows of padding
    if there are fewer.
    """

    indices: list[int]
    rows: int
    length: int
    packed: bool = True


def parts_of(lengths: Sequence[int], layout: Layout, token_budget: int) -> list[list[Part]]:
    """The micro-batches of each rank of data parallelism; all have the same number, some may be empty.

    Ranks that share experts or a pipeline wait for each other in every micro-batch, so none may have one less.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(layout.data)]
    for place, index in enumerate(order):
        # There and back again: whoever got the longest of a round gets the shortest of the next.
        turn, back = place % layout.data, (place // layout.data) % 2
        shares[layout.data - 1 - turn if back else turn].append(index)
    packed = layout.context == 1
    cuts = [_cut([lengths[i] for i in share], layout, token_budget, max(lengths)) for share in shares]
    count = max(map(len, cuts))
    if layout.virtual > 1:
        count = -(-count // layout.pipeline) * layout.pipeline
    named = [[[share[i] for i in part] for part in cut] for share, cut in zip(shares, cuts, strict=True)]
    parts = [[_part(lengths, part, layout.multiple, packed=packed) for part in cut] for cut in named]
    empty = Part([], 1, layout.multiple, packed)
    whole = [cut + [empty] * (count - len(cut)) for cut in parts]
    if layout.virtual == 1:
        return whole
    # Virtual stages do not tell each other the shapes that they send.
    rows = max(part.rows for cut in whole for part in cut)
    length = max(part.length for cut in whole for part in cut)
    return [[Part(part.indices, rows, length, packed) for part in cut] for cut in whole]


def _cut(lengths: list[int], layout: Layout, token_budget: int, longest: int) -> list[list[int]]:
    """Micro-batches within the budget; those padded that must have one shape count as long as the step's longest."""
    packed = layout.context == 1
    sizes = lengths if packed or layout.virtual == 1 else [longest] * len(lengths)
    return micro_batches(sizes, token_budget=token_budget, padded=not packed)


def _part(lengths: Sequence[int], indices: list[int], multiple: int, *, packed: bool) -> Part:
    wanted = [lengths[i] for i in indices]
    least = sum(wanted) if packed else max(wanted)
    return Part(indices, 1 if packed else len(indices), -(-least // multiple) * multiple, packed)


@dataclass(frozen=True, slots=True)
class PartTensors:
    """A micro-batch on the device.

    `tokens [rows, length] int64`; `targets [rows, length] int64`, the token after each; `scored [rows, length] bool`,
    whether that is a completion's; `places [sequences, width] int64`, where the token before a completion's stands in
    `rows * length`; `mask [sequences, width] bool`, which of these there are, with at least one sequence; `packing`, if
    it is packed; `experts [rows, length, layers, experts_of_token] int64`, those to compute with, -1 for the router's
    own choice, if some were recorded.
    """

    tokens: Tensor
    targets: Tensor
    scored: Tensor
    places: Tensor
    mask: Tensor
    packing: Packing | None = None
    experts: Tensor | None = None

    @property
    def width(self) -> int:
        """Tokens of the longest completion, at least 1."""
        return self.mask.shape[1]

    @classmethod
    def of(cls, part: Part, sequences: Sequences, device: torch.device) -> PartTensors:
        """Lay sequences out."""
        lengths = [len(sequences.prompts[i]) + len(sequences.completions[i]) for i in part.indices]
        starts = _starts(part, lengths)
        width = max([1, *(len(sequences.completions[i]) for i in part.indices)])
        rows = max(part.rows, len(part.indices))
        tokens = np.zeros(part.rows * part.length, np.int64)
        scored = np.zeros(part.rows * part.length, np.bool_)
        places = np.zeros((rows, width), np.int64)
        mask = np.zeros((rows, width), np.bool_)
        for row, (index, start) in enumerate(zip(part.indices, starts, strict=True)):
            prompt, completion = sequences.prompts[index], sequences.completions[index]
            first, end = start + len(prompt), start + len(prompt) + len(completion)
            tokens[start:first], tokens[first:end] = prompt, completion
            scored[first - 1 : end - 1] = True
            places[row, : len(completion)] = np.arange(first - 1, end - 1)
            mask[row, : len(completion)] = True
        shape = part.rows, part.length
        arrays = (tokens.reshape(shape), np.roll(tokens, -1).reshape(shape), scored.reshape(shape), places, mask)
        on = [torch.from_numpy(array).to(device) for array in arrays]
        packing = None
        if part.packed:
            behind = part.length - sum(lengths)
            packing = Packing.of([*lengths, behind] if behind else lengths, device)
        experts = None
        if sequences.experts is not None:
            experts = torch.from_numpy(_experts(part, starts, sequences.experts)).to(device)
        return cls(on[0], on[1], on[2], on[3], on[4], packing, experts)


def _starts(part: Part, lengths: Sequence[int]) -> list[int]:
    """Where each sequence begins in `rows * length`."""
    if part.packed:
        return list(accumulate(lengths, initial=0))[:-1]
    return [row * part.length for row in range(len(lengths))]


def _experts(part: Part, starts: Sequence[int], recorded: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Recorded experts of a micro-batch's tokens; a sequence's last one, and padding, have none."""
    out = np.full((part.rows * part.length, *recorded[0].shape[1:]), MISSING, np.int64)
    for index, start in zip(part.indices, starts, strict=True):
        out[start : start + len(recorded[index])] = recorded[index]
    return out.reshape(part.rows, part.length, *out.shape[1:])
