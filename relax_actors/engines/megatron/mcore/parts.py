"""A step's sequences as the micro-batches of each rank: who computes what follows from lengths and layout alone.

Sequences stand at the left of a micro-batch and are padded on the right, so that causal attention needs no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.micro_batches import micro_batches
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.sequences import Sequences
from relax_actors.routing import MISSING


@dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch `[rows, length]`: the sequences of `indices`, and rows of padding if there are fewer."""

    indices: list[int]
    rows: int
    length: int


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
    cuts = [_cut([lengths[i] for i in share], layout, token_budget, max(lengths)) for share in shares]
    count = max(map(len, cuts))
    if layout.virtual > 1:
        count = -(-count // layout.pipeline) * layout.pipeline
    padded = [[[share[i] for i in part] for part in cut] for share, cut in zip(shares, cuts, strict=True)]
    parts = [[_part(lengths, part, layout.multiple) for part in cut] for cut in padded]
    empty = Part([], 1, layout.multiple)
    whole = [cut + [empty] * (count - len(cut)) for cut in parts]
    if layout.virtual == 1:
        return whole
    rows = max(part.rows for cut in whole for part in cut)
    length = max(part.length for cut in whole for part in cut)
    return [[Part(part.indices, rows, length) for part in cut] for cut in whole]


def _cut(lengths: list[int], layout: Layout, token_budget: int, longest: int) -> list[list[int]]:
    """Micro-batches within the budget; all padded to the longest sequence of the step if they must have one shape."""
    sizes = lengths if layout.virtual == 1 else [longest] * len(lengths)
    return micro_batches(sizes, token_budget=token_budget, padded=True)


def _part(lengths: Sequence[int], indices: list[int], multiple: int) -> Part:
    longest = max(lengths[i] for i in indices)
    return Part(indices, len(indices), -(-longest // multiple) * multiple)


@dataclass(frozen=True, slots=True)
class PartTensors:
    """A micro-batch on the device.

    `tokens [rows, length] int64`; `targets [rows, length] int64`, the token after each; `scored [rows, length] bool`,
    whether that is a completion's; `places [rows, width] int64`, where the token before a completion's stands;
    `mask [rows, width] bool`, which of these there are; `experts [rows, length, layers, experts_of_token] int64`, those
    to compute with, -1 for the router's own choice, if some were recorded.
    """

    tokens: Tensor
    targets: Tensor
    scored: Tensor
    places: Tensor
    mask: Tensor
    experts: Tensor | None = None

    @property
    def width(self) -> int:
        """Tokens of the longest completion, at least 1."""
        return self.mask.shape[1]

    @classmethod
    def of(cls, part: Part, sequences: Sequences, device: torch.device) -> PartTensors:
        """Lay sequences out."""
        width = max([1, *(len(sequences.completions[i]) for i in part.indices)])
        tokens = np.zeros((part.rows, part.length), np.int64)
        scored = np.zeros((part.rows, part.length), np.bool_)
        places = np.zeros((part.rows, width), np.int64)
        mask = np.zeros((part.rows, width), np.bool_)
        for row, index in enumerate(part.indices):
            prompt, completion = sequences.prompts[index], sequences.completions[index]
            first, end = len(prompt), len(prompt) + len(completion)
            tokens[row, :first], tokens[row, first:end] = prompt, completion
            scored[row, first - 1 : end - 1] = True
            places[row, : len(completion)] = np.arange(first - 1, end - 1)
            mask[row, : len(completion)] = True
        arrays = (tokens, np.roll(tokens, -1, 1), scored, places, mask)
        experts = None
        if sequences.experts is not None:
            experts = torch.from_numpy(_experts(part, sequences.experts)).to(device)
        on = [torch.from_numpy(array).to(device) for array in arrays]
        return cls(on[0], on[1], on[2], on[3], on[4], experts)


def _experts(part: Part, recorded: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Recorded experts of a micro-batch's tokens; a sequence's last one, and padding, have none."""
    out = np.full((part.rows, part.length, *recorded[0].shape[1:]), MISSING, np.int64)
    for row, index in enumerate(part.indices):
        out[row, : len(recorded[index])] = recorded[index]
    return out
