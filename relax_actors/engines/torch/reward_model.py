"""A frozen reward model of a folder, which scores answers or their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.config import Config
from relax_actors.data.score_folder import ScoreFolder
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.torch.devices import device_of
from relax_actors.engines.torch.forward import Forward
from relax_actors.engines.torch.micro_batch import MicroBatch
from relax_actors.engines.torch.score_model import build_score_model
from relax_actors.engines.torch.swappable_model import SwappableModel
from relax_actors.media.family import family_of


class TorchRewardModel(SwappableModel):
    """Scores with the forward pass that trains reward models, so that scores equal those of training.

    Raises:
        ConfigError: the folder holds no model that transformers can build, or no weights that fit it.
    """

    def __init__(self, config: Config, path: Path, folder: ScoreFolder, device: str = "auto") -> None:
        make = partial(build_score_model, path, classes=folder.classes, of_steps=folder.of_steps)
        super().__init__(path, device_of(device), follows=False, make=make)
        dtype, shares = getattr(torch, config.trainer.precision), config.trainer.share_prefixes
        self._forward = Forward(self._device, dtype, 1.0, family_of(path), share_prefixes=shares, scores=True)
        self._forward.prepare(self._model)
        self._max_tokens = config.trainer.max_tokens_per_microbatch
        self.freeze(path)

    def score(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute the scores of each sequence where its `loss_mask` is true, `[trained, classes] float32`."""

        def compute(batch: MicroBatch) -> Tensor:
            return self._forward.scores(self._model, batch)

        rows = self._forward.compute(self._model, compute, samples, self._max_tokens, progress)
        return [scores[sample.loss_mask] for sample, scores in zip(samples, rows, strict=True)]
