"""Log-probs of completions under a torch model: one forward pass for whoever trains or only scores.

A number depends on the weights and on the micro-batch that it was computed in: the same sequences handed over together
give the same bits, in whichever process; cut differently they differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from relax_actors.algorithms.losses import token_logprobs
from relax_actors.algorithms.micro_batches import micro_batches
from relax_actors.engines.sequences import Sequences


def device_of(name: str) -> torch.device:
    """The torch device of a setting; "auto" is CUDA where there is some."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Prompts padded on the left, completions on the right, so that completions begin in one column.

    `tokens [batch, seq] int64`; `mask [batch, seq] int64`; `completion_mask [batch, width] bool`.
    """

    tokens: Tensor
    mask: Tensor
    completion_mask: Tensor

    @property
    def width(self) -> int:
        """Tokens of the longest completion."""
        return self.completion_mask.shape[1]


class Forward:
    """How sequences are laid out and passed through a model.

    Args:
        device: where the models lie.
        dtype: what they compute in; their weights are float32.
        temperature: by which logits are divided.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, temperature: float) -> None:
        self.device, self._dtype, self._temperature = device, dtype, temperature

    def part(self, sequences: Sequences, indices: Sequence[int]) -> MicroBatch:
        """Some of the sequences as a micro-batch."""
        prompts = [sequences.prompts[i] for i in indices]
        completions = [sequences.completions[i] for i in indices]
        before, after = max(map(len, prompts)), max(map(len, completions))
        tokens = np.zeros((len(indices), before + after), np.int64)
        mask = np.zeros((len(indices), before + after), np.int64)
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            tokens[row, before - len(prompt) : before] = prompt
            tokens[row, before : before + len(completion)] = completion
            mask[row, before - len(prompt) : before + len(completion)] = 1
        whole = torch.from_numpy(mask).to(self.device)
        return MicroBatch(torch.from_numpy(tokens).to(self.device), whole, whole[:, before:].bool())

    def padded(self, arrays: Sequence[NDArray[Any]], indices: Sequence[int], width: int) -> Tensor:
        """Values of the completions' tokens as a micro-batch has them, `[batch, width] float32`."""
        out = np.zeros((len(indices), width), np.float32)
        for row, index in enumerate(indices):
            out[row, : len(arrays[index])] = arrays[index]
        return torch.from_numpy(out).to(self.device)

    def logprobs(self, model: PreTrainedModel, part: MicroBatch, temperature: float | None = None) -> Tensor:
        """Log-probs of the completions' tokens, `[batch, width] float32`."""
        with torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32):
            logits = model(
                input_ids=part.tokens,
                attention_mask=part.mask,
                position_ids=(part.mask.cumsum(-1) - 1).clamp(min=0),
                use_cache=False,
                logits_to_keep=part.width + 1,
            ).logits
        wanted = self._temperature if temperature is None else temperature
        return token_logprobs(logits[:, :-1], part.tokens[:, -part.width :], wanted)

    @torch.no_grad()
    def score(
        self, model: PreTrainedModel, sequences: Sequences, token_budget: int, progress: Callable[[], None]
    ) -> list[NDArray[Any]]:
        """Log-probs of each completion, `[len] float32`, in micro-batches of up to `token_budget` tokens.

        Raises:
            ValueError: a sequence is empty, or longer than the budget.
        """
        model.train(mode=False)
        found: list[NDArray[Any]] = [np.zeros(0, np.float32)] * len(sequences)
        for indices in micro_batches(sequences.lengths, token_budget=token_budget):
            part = self.part(sequences, indices)
            if part.width:
                scored = self.logprobs(model, part).cpu().numpy()
                for row, index in enumerate(indices):
                    found[index] = scored[row, : len(sequences.completions[index])].copy()
            progress()
        return found
