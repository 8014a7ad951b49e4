"""Rotary positions and media of a packed micro-batch of a multimodal model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
        paths: Sequence[NDArray[Any]],
        shared: Sequence[int],
        length: int,
        device: torch.device,
    ) -> MicroBatchMedia:
        """Find the media of packed sequences.

        Args:
            family: family of the model.
            samples: the sequences.
            paths: `[len] int64` of each sequence, index of its tokens in the micro-batch.
            shared: leading tokens of each that its predecessor holds.
            length: tokens of the micro-batch, with padding.
            device: device of the tensors.
        """
        found = np.zeros((3, 0), np.int64)
        if samples:
            found = positions_of([(sample.inputs, sample.media) for sample in samples], shared)
        padded = np.pad(found, ((0, 0), (0, length - found.shape[1])))
        sequences = [(sample.token_ids, sample.media) for sample in samples]
        placement = Placement.of(family, sequences, paths, device)
        return cls(torch.from_numpy(padded).to(device), placement)
