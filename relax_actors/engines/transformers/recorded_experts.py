"""The experts that a batch of samples was generated with, gathered pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.messages.experts import MISSING


class RecordedExperts:
    """Of each token in the pass that gave the one after it: what is read again under newer weights stays as it was.

    Args:
        samples: of each prompt.
    """

    def __init__(self, samples: Sequence[int]) -> None:
        self._samples = samples
        self._prompts: list[NDArray[Any]] = []
        # Of the steps so far, those with the same samples together: `[alive]`, `[alive, steps, layers, experts]`.
        self._parts: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._steps: list[Tensor] = []
        self._alive: Tensor | None = None

    def prompts(self, chosen: Tensor, lengths: Sequence[int]) -> None:
        """Of the prompts, `[prompts, longest, layers, experts_of_token]`, padded on the left."""
        found = chosen.to("cpu", torch.int16).numpy()
        self._prompts = [one[len(one) - length :].copy() for one, length in zip(found, lengths, strict=True)]

    def step(self, chosen: Tensor, alive: Tensor) -> None:
        """Of the newest token of the samples `alive`, `[alive, layers, experts_of_token]`."""
        if alive is not self._alive:
            self._fetch()
            self._alive = alive
        self._steps.append(chosen.to(torch.int16))

    def _fetch(self) -> None:
        """Fetch from the device, at once, what was put down since the last time."""
        if self._alive is not None and self._steps:
            self._parts.append((self._alive.cpu().numpy(), torch.stack(self._steps, 1).cpu().numpy()))
            self._steps = []

    def of(self, i: int, lengths: Sequence[int]) -> list[NDArray[Any]]:
        """Of each sample of a prompt, with so many tokens, `[prompt_len + len - 1, layers, experts_of_token] int16`."""
        self._fetch()
        prompt, steps = self._prompts[i], sum(chosen.shape[1] for _, chosen in self._parts)
        its = np.arange(len(lengths)) + sum(self._samples[:i])
        after = np.full((len(lengths), steps, *prompt.shape[1:]), MISSING, np.int16)
        first = 0
        for alive, chosen in self._parts:
            here = np.isin(its, alive)
            after[here, first : first + chosen.shape[1]] = chosen[np.searchsorted(alive, its[here])]
            first += chosen.shape[1]
        return [np.concatenate([prompt, part[: length - 1]]) for part, length in zip(after, lengths, strict=True)]
