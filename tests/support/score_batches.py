"""Batches of rows from the data for reward models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relax_actors.config import Config
from relax_actors.engines.protocols import TrainSample
from tests.support.media_batches import media_batch
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


def media_pairs(config: Config) -> list[TrainSample]:
    """Draw a chosen and a rejected answer to each of several prompts, with and without media, scored at the end."""
    found = []
    for number, sample in enumerate(media_batch(config)):
        length = len(sample)
        found.append(
            replace(
                sample,
                loss_mask=np.arange(length) == length - 1,
                advantages=np.full(length, -1.0 if number % 2 else 1.0, np.float32),
                targets=np.zeros(length, np.float32),
                values=None,
                returns=None,
                sample=number % 2,
            )
        )
    return found
