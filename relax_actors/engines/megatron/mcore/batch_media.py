"""Rotary positions and media of a packed micro-batch of a multimodal model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.torch.multimodal import Placement, positions_of
from relax_actors.media.family import Family


@dataclass(frozen=True, slots=True)
class MicroBatchMedia:
    """How a multimodal model reads the tokens of a micro-batch.

    Attributes:
        positions: `[3, length]`, temporal, vertical and horizontal position of each token; 0 for padding.
        placement: places of media among the tokens; None without media.
    """

    positions: Tensor
    placement: Placement | None

    @classmethod
    def of(
        cls,
        family: Family,
        samples: Sequence[TrainSample],
        starts: Sequence[int],
        length: int,
        device: torch.device,
    ) -> MicroBatchMedia:
        """Find the media of sequences that lie one after another.

        Args:
            family: family of the model.
            samples: the sequences.
            starts: index of each one's first token.
            length: tokens of the micro-batch, with padding.
            device: device of the tensors.
        """
        found = np.zeros((3, 0), np.int64)
        if samples:
            found = positions_of([(len(sample), sample.media) for sample in samples])
        padded = np.pad(found, ((0, 0), (0, length - found.shape[1])))
        sequences = [(sample.token_ids, sample.media) for sample in samples]
        placement = Placement.of(family, sequences, starts, device)
        return cls(torch.from_numpy(padded).to(device), placement)
