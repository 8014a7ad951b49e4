"""The experts that a batch of samples was generated with, gathered pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.routing import MISSING


class RecordedExperts:
    """Of each token in the pass that gave the one after it: what is read again under newer weights stays as it was.

    Args:
        samples: of each prompt.
    """

    def __init__(self, samples: Sequence[int]) -> None:
        self._samples = samples
        self._prompts: list[NDArray[Any]] = []
        self._steps: list[tuple[Tensor, Tensor]] = []

    def prompts(self, chosen: Tensor, lengths: Sequence[int]) -> None:
        """Of the prompts, `[prompts, longest, layers, experts_of_token]`, padded on the left."""
        found = chosen.to("cpu", torch.int16).numpy()
        self._prompts = [one[len(one) - length :].copy() for one, length in zip(found, lengths, strict=True)]

    def step(self, chosen: Tensor, alive: Tensor) -> None:
        """Of the newest token of the samples `alive`, `[alive, layers, experts_of_token]`."""
        self._steps.append((alive, chosen.to(torch.int16)))

    def of(self, i: int, lengths: Sequence[int]) -> list[NDArray[Any]]:
        """Of each sample of a prompt, with so many tokens, `[prompt_len + len - 1, layers, experts_of_token] int16`."""
        prompt = self._prompts[i]
        its = np.arange(len(lengths)) + sum(self._samples[:i])
        after = np.full((len(lengths), len(self._steps), *prompt.shape[1:]), MISSING, np.int16)
        # Samples leave the batch seldom: what lies between is fetched from the device at once.
        first = 0
        for _, same in groupby(self._steps, lambda step: id(step[0])):
            steps = list(same)
            alive = steps[0][0].cpu().numpy()
            here = np.isin(its, alive)
            places = torch.from_numpy(np.searchsorted(alive, its[here]))
            chosen = torch.stack([one[places.to(one.device)] for _, one in steps], 1).cpu().numpy()
            after[here, first : first + len(steps)] = chosen
            first += len(steps)
        return [np.concatenate([prompt, part[: length - 1]]) for part, length in zip(after, lengths, strict=True)]
