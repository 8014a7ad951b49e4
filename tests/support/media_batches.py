"""Samples of prompts with random media, to train engines of every kind on."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedModel

from relax_actors.config import Config
from relax_actors.engines.protocols import TrainSample
from relax_actors.engines.torch.model import build
from relax_actors.media.family import family_of
from tests.support.tiny_media_models import prompts_of


def media_batch(config: Config, seed: int = 3, model: PreTrainedModel | None = None) -> list[TrainSample]:
    """Make two samples of each of some prompts, with and without media, for the model of a run."""
    family, random, found = family_of(config.model_path), np.random.default_rng(seed), []
    assert family is not None
    prompts = prompts_of(model or build(config.model_path, seed=1), family, seed)
    for row, (tokens, media) in enumerate(prompts):
        for n in range(2):
            length = 4 + n
            arrays = {
                name: random.normal(0, 0.3, length).astype(np.float32) for name in ("advantages", "values", "returns")
            }
            completion = random.integers(0, 10, length).astype(np.int32)
            sample = TrainSample.of_completion(
                tokens, completion, logprobs=np.full(length, -2.0, np.float32), **arrays, media=media, row=row
            )
            found.append(sample)
    return found
