"""Log-probs of completions under a torch model: one forward pass for whoever trains or only scores.

A number depends on the weights and on the micro-batch that it was computed in: the same sequences handed over together
give the same bits, in whichever process; cut differently they differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from relax_actors.algorithms.losses import token_logprobs
from relax_actors.algorithms.micro_batches import micro_batches
from relax_actors.engines.protocols.sequences import Sequences
from relax_actors.engines.torch.experts import Routers, laid_out
from relax_actors.engines.torch.packing import ATTENTION, Packing


def device_of(name: str) -> torch.device:
    """The torch device of a setting; "auto" is CUDA where there is some."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences laid end to end, longest first as `micro_batches` gives them.

    `tokens [1, total] int64`; `scored [completion_tokens] int64`, the place in `tokens` before each completion's token;
    `places [completion_tokens] int64`, its place in `[batch * width]`; `completion_mask [batch, width] bool`;
    `experts [moe_layers, total, experts_of_token] int64`, those to compute with, if some were recorded.
    """

    tokens: Tensor
    packing: Packing
    scored: Tensor
    places: Tensor
    completion_mask: Tensor
    experts: Tensor | None = None

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

    def prepare(self, model: PreTrainedModel) -> PreTrainedModel:
        """Have a model compute on packed sequences, without dropout; gives it back."""
        model.set_attn_implementation(ATTENTION)
        model.train(mode=False)
        return model

    def part(self, sequences: Sequences, indices: Sequence[int]) -> MicroBatch:
        """Some of the sequences as a micro-batch."""
        pieces, scored, lengths, completions, places, at = [], [], [], [], [], 0
        for index in indices:
            prompt, completion = sequences.prompts[index], sequences.completions[index]
            pieces += [prompt, completion]
            scored.append(np.arange(at + len(prompt), at + len(prompt) + len(completion)) - 1)
            lengths.append(len(prompt) + len(completion))
            completions.append(len(completion))
            places.append(slice(at, at + lengths[-1]))
            at += lengths[-1]
        mask = np.arange(max(completions)) < np.array(completions)[:, None]
        tokens = np.concatenate(pieces).astype(np.int64)[None]
        arrays = (tokens, np.concatenate(scored), np.flatnonzero(mask), mask)
        on = [torch.from_numpy(array).to(self.device) for array in arrays]
        experts = None
        if sequences.experts is not None:
            recorded = laid_out([sequences.experts[index] for index in indices], places, at)
            experts = torch.from_numpy(recorded).to(self.device)
        return MicroBatch(on[0], Packing.of(lengths, self.device), on[1], on[2], on[3], experts)

    def padded(self, arrays: Sequence[NDArray[Any]], indices: Sequence[int], width: int) -> Tensor:
        """Values of the completions' tokens as a micro-batch has them, `[batch, width] float32`."""
        out = np.zeros((len(indices), width), np.float32)
        for row, index in enumerate(indices):
            out[row, : len(arrays[index])] = arrays[index]
        return torch.from_numpy(out).to(self.device)

    def logprobs(
        self,
        model: PreTrainedModel,
        part: MicroBatch,
        temperature: float | None = None,
        *,
        routers: Routers | None = None,
        only_count: bool = False,
    ) -> Tensor:
        """Log-probs of the completions' tokens, `[batch, width] float32`, 0 behind their ends.

        Args:
            model: that `prepare` prepared.
            part: the micro-batch.
            temperature: by which logits are divided, if it is not the run's.
            routers: of the model, where the micro-batch's experts are to be replayed.
            only_count: have them choose for themselves, and only count where that is something else.
        """
        replaying: AbstractContextManager[None] = nullcontext()
        if routers is not None and part.experts is not None:
            replaying = routers.replaying(part.experts, only_count=only_count)
        with replaying, torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32):
            logits = model(
                input_ids=part.tokens,
                position_ids=part.packing.positions,
                packing=part.packing,
                use_cache=False,
                logits_to_keep=part.scored,
            ).logits
        wanted = self._temperature if temperature is None else temperature
        found = token_logprobs(logits, part.tokens[:, part.scored + 1], wanted)[0]
        room = found.new_zeros(part.completion_mask.numel())
        return room.index_copy(0, part.places, found).view(part.completion_mask.shape)

    @torch.no_grad()
    def score(
        self,
        model: PreTrainedModel,
        sequences: Sequences,
        token_budget: int,
        progress: Callable[[], None],
        routers: Routers | None = None,
    ) -> list[NDArray[Any]]:
        """Log-probs of each completion, `[len] float32`, in micro-batches of up to `token_budget` tokens.

        Raises:
            ValueError: a sequence is empty, or longer than the budget.
        """
        found: list[NDArray[Any]] = [np.zeros(0, np.float32)] * len(sequences)
        for indices in micro_batches(sequences.lengths, token_budget=token_budget):
            part = self.part(sequences, indices)
            if part.width:
                scored = self.logprobs(model, part, routers=routers).cpu().numpy()
                for row, index in enumerate(indices):
                    found[index] = scored[row, : len(sequences.completions[index])].copy()
            progress()
        return found
