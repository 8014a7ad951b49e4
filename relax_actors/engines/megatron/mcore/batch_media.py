"""Rotary positions and media of a micro-batch of a multimodal model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.torch.multimodal import Placement
from relax_actors.media.family import Family


@dataclass(frozen=True, slots=True)
class MicroBatchMedia:
    """How a multimodal model reads the tokens of a micro-batch.

    Attributes:
        positions: `[3, rows, length] float32`, temporal, vertical and horizontal position of each token; 0 for padding.
        placement: places of media among the `rows * length` tokens; None without media.
    """

    positions: Tensor
    placement: Placement | None

    @classmethod
    def of(
        cls,
        family: Family,
        samples: Sequence[TrainSample],
        paths: Sequence[NDArray[Any]],
        shape: tuple[int, int],
        device: torch.device,
    ) -> MicroBatchMedia:
        """Find the media of sequences.

        Args:
            family: family of the model.
            samples: the sequences.
            paths: `[len] int64` of each sequence, index of its tokens in the micro-batch; sequences that share a
                prefix have the same indices there.
            shape: rows and length of the micro-batch, with padding.
            device: device of the tensors.
        """
        positions = np.zeros((3, shape[0] * shape[1]), np.float32)
        for sample, path in zip(samples, paths, strict=True):
            own = np.arange(sample.inputs) if sample.media is None else sample.media.positions_of(sample.inputs)
            positions[:, path] = own
        sequences = [(sample.token_ids, sample.media) for sample in samples]
        placement = Placement.of(family, sequences, paths, device)
        return cls(torch.from_numpy(positions.reshape(3, *shape)).to(device), placement)
