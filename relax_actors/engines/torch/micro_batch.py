"""Tensors of a micro-batch of packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.engines.protocols.samples import MicroBatchPlan, TrainSample, input_lengths, plan_micro_batches
from relax_actors.engines.ranks.shares import share_out
from relax_actors.engines.torch import multimodal
from relax_actors.engines.torch.experts import pack_experts
from relax_actors.engines.torch.multimodal import Placement
from relax_actors.engines.torch.packing import Packing
from relax_actors.media.family import Family

IDLE = MicroBatchPlan([], [])
"""A rank computes with it while others still have sequences."""


def plans_of_ranks(
    samples: Sequence[TrainSample],
    ranks: int,
    max_tokens: int,
    *,
    share_prefixes: bool,
    keeps_rows: bool,
    alone: bool = False,
) -> list[list[MicroBatchPlan]]:
    """Return the micro-batches of each rank; arguments as of `share_out` and `plan_micro_batches`."""
    if ranks == 1:
        return [plan_micro_batches(samples, max_tokens, share_prefixes=share_prefixes, alone=alone)]
    plans = []
    for share in share_out(samples, ranks, share_prefixes=share_prefixes, keeps_rows=keeps_rows):
        of_share = [samples[i] for i in share]
        own = plan_micro_batches(of_share, max_tokens, share_prefixes=share_prefixes, alone=alone)
        plans.append([MicroBatchPlan([share[i] for i in plan.indices], plan.shared) for plan in own])
    return plans


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Concatenated sequences, in the order of their plan, each up to the last token where the model is read.

    Losses get the trained tokens of each sequence only, padded to `[batch, width]`.

    Attributes:
        tokens: `[1, total] int64`; a prefix that sequences share stands once.
        packing: layout of the sequences in `tokens`.
        scored: `[trained] int64`, index in `tokens` of the token where the model is read for each trained token.
        targets: `[trained, 1] int64`, the trained tokens.
        places: `[trained] int64`, index of each trained token in the padded layout `[batch * width]`.
        mask: `[batch, width] bool`, true for trained tokens, false for padding.
        experts: `[moe_layers, total, experts_per_token] int64`, recorded experts; None unless all sequences have them.
        positions: `[3, 1, total] int64`, rotary positions of a multimodal model; None for a model that reads text only.
        placement: places of media in `tokens`; None without media.
    """

    tokens: Tensor
    packing: Packing
    scored: Tensor
    targets: Tensor
    places: Tensor
    mask: Tensor
    experts: Tensor | None = None
    positions: Tensor | None = None
    placement: Placement | None = None

    @classmethod
    def of(
        cls, samples: Sequence[TrainSample], plan: MicroBatchPlan, device: torch.device, family: Family | None = None
    ) -> MicroBatch:
        """Build the micro-batch of the sequences that a plan names; `family` is that of a multimodal model."""
        chosen, shared = [samples[index] for index in plan.indices], plan.shared
        lengths = input_lengths(chosen)
        blocks = None
        if family is not None and family.spec.decoder.joins_images:
            blocks = [multimodal.image_blocks(sample.media, n) for sample, n in zip(chosen, lengths, strict=True)]
        packing = Packing.of(lengths, device, shared, blocks)
        trained = [np.flatnonzero(sample.loss_mask) for sample in chosen]
        counts = np.array([len(places) for places in trained])
        mask = np.arange(counts.max()) < counts[:, None]
        scored = [path[t - s.lag] for path, t, s in zip(packing.paths, trained, chosen, strict=True)]
        targets = [sample.token_ids[places] for sample, places in zip(chosen, trained, strict=True)]
        tokens = [s.token_ids[prefix:length] for s, prefix, length in zip(chosen, shared, lengths, strict=True)]
        ids = [np.concatenate(arrays).astype(np.int64) for arrays in (tokens, scored, targets)]
        on = [torch.from_numpy(array).to(device) for array in (*ids, np.flatnonzero(mask), mask)]
        batch = cls(on[0][None], packing, on[1], on[2][:, None], on[3], on[4], _experts(chosen, packing, device))
        return batch if family is None else batch._with_media(family, chosen, shared, device)

    def _with_media(
        self, family: Family, samples: Sequence[TrainSample], shared: Sequence[int], device: torch.device
    ) -> MicroBatch:
        """Add the rotary positions and the media of the sequences."""
        positions = multimodal.positions_of([(s.inputs, s.media) for s in samples], shared)[:, None]
        sequences = [(sample.token_ids, sample.media) for sample in samples]
        placement = Placement.of(family, sequences, self.packing.paths, device)
        return replace(self, positions=torch.from_numpy(positions).to(device), placement=placement)

    def laid_out(self, values: Tensor) -> Tensor:
        """Lay out values of the trained tokens, `[trained, ...]`, as `[batch, width, ...]`."""
        flat = values.new_zeros((self.mask.numel(), *values.shape[1:]))
        return flat.index_copy(0, self.places, values).view(*self.mask.shape, *values.shape[1:])

    @property
    def width(self) -> int:
        """Largest number of trained tokens of a sequence."""
        return self.mask.shape[1]


def padded(arrays: Sequence[NDArray[Any]], width: int) -> Tensor:
    """Pad values of the trained tokens of each sequence with 0.

    Args:
        arrays: `[trained]` or `[trained, k]` of each sequence, numbers or token ids.
        width: largest number of trained tokens.

    Returns:
        `[batch, width]` or `[batch, width, k]`, float32 or, for ids, int64.
    """
    dtype = np.int64 if arrays[0].dtype.kind == "i" else np.float32
    out = np.zeros((len(arrays), width, *arrays[0].shape[1:]), dtype)
    for row, array in enumerate(arrays):
        out[row, : len(array)] = array
    return torch.from_numpy(out)


def _experts(samples: Sequence[TrainSample], packing: Packing, device: torch.device) -> Tensor | None:
    """Lay out recorded experts; a sequence without any leaves its choices to the routers."""
    known = [
        (sample.routed_experts, path)
        for path, sample in zip(packing.paths, samples, strict=True)
        if sample.routed_experts is not None
    ]
    if not known:
        return None
    total = packing.positions.shape[1]
    packed = pack_experts([experts for experts, _ in known], [path for _, path in known], total)
    return torch.from_numpy(packed).to(device)
