"""Batches of rows from the data for reward models."""

from __future__ import annotations

import numpy as np

from relax_actors.engines.protocols import TrainSample
from tests.support.models import STOP


def score_batch(rows: str, classes: int = 1, seed: int = 2) -> list[TrainSample]:
    """Draw two answers for each of four prompts, with a score at the end, and of steps at every third token, too."""
    random, found = np.random.default_rng(seed), []
    for row in range(4):
        prompt = random.integers(0, STOP, 5)
        for sample in range(2):
            answer = np.append(random.integers(0, STOP, int(random.integers(2, 9))), STOP)
            ids = np.concatenate([prompt, answer]).astype(np.int32)
            places = np.arange(len(ids))
            mask = places == len(ids) - 1
            if rows == "steps":
                mask |= (places >= len(prompt)) & (places % 3 == 0)
            labels = random.integers(0, max(2, classes), len(ids))
            found.append(
                TrainSample(
                    ids,
                    mask,
                    logprobs=np.zeros(len(ids), np.float32),
                    advantages=np.full(len(ids), -1.0 if sample and rows == "pairs" else 1.0, np.float32),
                    targets=np.asarray(labels * 0.1 if rows == "pairs" else labels, np.float32),
                    row=row,
                    sample=sample,
                )
            )
    return found
