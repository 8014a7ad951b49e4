"""Records the experts chosen while a batch of samples is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.messages.experts import MISSING


class ExpertRecorder:
    """Records, for each token, the experts in the forward pass that sampled the next token.

    A prefill with newer weights does not change what is recorded for earlier tokens.
    """

    def __init__(self, samples: Sequence[int]) -> None:
        self._samples = samples
        self._prompts: list[NDArray[Any]] = []
        # Fetched steps, grouped by the samples that were alive: `[alive]`, `[alive, steps, layers, experts]`.
        self._parts: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._steps: list[Tensor] = []
        self._alive: Tensor | None = None

    def record_prompts(self, chosen: Tensor, lengths: Sequence[int]) -> None:
        """Record the experts of the prompts.

        Args:
            chosen: `[prompts, longest, layers, experts_of_token]`, padded on the left.
            lengths: number of tokens of each prompt.
        """
        experts = chosen.to("cpu", torch.int16).numpy()
        self._prompts = [one[len(one) - length :].copy() for one, length in zip(experts, lengths, strict=True)]

    def record_step(self, chosen: Tensor, alive: Tensor) -> None:
        """Record the experts of the newest token of each sample in the batch.

        Args:
            chosen: `[alive, layers, experts_of_token]`.
            alive: `[alive]`, numbers of the samples in the batch.
        """
        if alive is not self._alive:
            self._fetch()
            self._alive = alive
        self._steps.append(chosen.to(torch.int16))

    def _fetch(self) -> None:
        """Copy the steps since the last call from the device, in one transfer."""
        if self._alive is not None and self._steps:
            self._parts.append((self._alive.cpu().numpy(), torch.stack(self._steps, 1).cpu().numpy()))
            self._steps = []

    def experts_of(self, i: int, lengths: Sequence[int]) -> list[NDArray[Any]]:
        """Return the experts of the samples of prompt `i`.

        Args:
            i: number of the prompt.
            lengths: completion tokens of each sample.

        Returns:
            Per sample `[prompt_len + len - 1, layers, experts_of_token] int16`.
        """
        self._fetch()
        prompt, steps = self._prompts[i], sum(chosen.shape[1] for _, chosen in self._parts)
        numbers = np.arange(len(lengths)) + sum(self._samples[:i])
        completions = np.full((len(lengths), steps, *prompt.shape[1:]), MISSING, np.int16)
        first = 0
        for alive, chosen in self._parts:
            present = np.isin(numbers, alive)
            rows = np.searchsorted(alive, numbers[present])
            completions[present, first : first + chosen.shape[1]] = chosen[rows]
            first += chosen.shape[1]
        return [np.concatenate([prompt, part[: n - 1]]) for part, n in zip(completions, lengths, strict=True)]
