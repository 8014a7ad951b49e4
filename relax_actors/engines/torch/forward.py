"""Log-probs of sequences under a torch model: one forward pass for training and for scoring.

A result depends on the weights and on its micro-batch: the same sequences passed together give the same bits in any
process; cut into other micro-batches they differ by rounding.
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
from relax_actors.engines.protocols.samples import TrainSample, lengths_of
from relax_actors.engines.torch.experts import Routers, laid_out
from relax_actors.engines.torch.packing import ATTENTION, Packing


def device_of(name: str) -> torch.device:
    """Return the torch device of a setting; "auto" is CUDA where available, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences laid end to end, longest first as `micro_batches` orders them.

    Losses see the trained tokens of each sequence without the tokens between them, padded to `[batch, width]`.

    Attributes:
        tokens: `[1, total] int64`.
        packing: where each sequence lies in `tokens`.
        scored: `[trained] int64`, index in `tokens` of the token before each trained token.
        places: `[trained] int64`, index of each trained token in `[batch * width]`.
        mask: `[batch, width] bool`, true where a trained token lies.
        experts: `[moe_layers, total, experts_per_token] int64`, experts to compute with, where some were recorded.
    """

    tokens: Tensor
    packing: Packing
    scored: Tensor
    places: Tensor
    mask: Tensor
    experts: Tensor | None = None

    @property
    def width(self) -> int:
        """Trained tokens of the sequence that has most."""
        return self.mask.shape[1]


class Forward:
    """Lays sequences out and passes them through a model.

    Args:
        device: device of the models.
        dtype: type that they compute in; their weights are float32.
        temperature: divisor of the logits.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, temperature: float) -> None:
        self.device, self._dtype, self._temperature = device, dtype, temperature

    def prepare(self, model: PreTrainedModel) -> PreTrainedModel:
        """Set a model up for packed sequences, without dropout, and return it."""
        model.set_attn_implementation(ATTENTION)
        model.train(mode=False)
        return model

    def part(self, samples: Sequence[TrainSample], indices: Sequence[int]) -> MicroBatch:
        """Build a micro-batch of some sequences."""
        chosen = [samples[index] for index in indices]
        ends = np.cumsum([len(sample) for sample in chosen])
        begins = ends - [len(sample) for sample in chosen]
        trained = [np.flatnonzero(sample.loss_mask) for sample in chosen]
        counts = np.array([len(places) for places in trained])
        mask = np.arange(counts.max()) < counts[:, None]
        scored = np.concatenate([places + begin - 1 for places, begin in zip(trained, begins, strict=True)])
        tokens = np.concatenate([sample.token_ids for sample in chosen]).astype(np.int64)[None]
        on = [torch.from_numpy(array).to(self.device) for array in (tokens, scored, np.flatnonzero(mask), mask)]
        return MicroBatch(
            on[0], Packing.of(lengths_of(chosen), self.device), on[1], on[2], on[3], self._experts(chosen, begins)
        )

    def _experts(self, samples: Sequence[TrainSample], begins: NDArray[Any]) -> Tensor | None:
        recorded = [sample.routed_experts for sample in samples]
        known = [experts for experts in recorded if experts is not None]
        if len(known) < len(recorded):
            return None
        places = [slice(begin, begin + len(sample)) for begin, sample in zip(begins, samples, strict=True)]
        laid = laid_out(known, places, sum(lengths_of(samples)))
        return torch.from_numpy(laid).to(self.device)

    def padded(self, arrays: Sequence[NDArray[Any]], width: int) -> Tensor:
        """Pad values of each sequence's trained tokens to `[batch, width] float32`."""
        out = np.zeros((len(arrays), width), np.float32)
        for row, array in enumerate(arrays):
            out[row, : len(array)] = array
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
        """Compute log-probs of the trained tokens, `[batch, width] float32`, 0 where `part.mask` is false.

        Args:
            model: a model set up by `prepare`.
            part: the micro-batch.
            temperature: divisor of the logits, if other than the run's.
            routers: routers of the model, to replay the micro-batch's experts.
            only_count: let the routers choose, and only count where they differ from the recorded experts.
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
        room = found.new_zeros(part.mask.numel())
        return room.index_copy(0, part.places, found).view(part.mask.shape)

    @torch.no_grad()
    def score(
        self,
        model: PreTrainedModel,
        samples: Sequence[TrainSample],
        token_budget: int,
        progress: Callable[[], None],
        routers: Routers | None = None,
    ) -> list[NDArray[Any]]:
        """Compute log-probs of each sequence, `[len] float32`, 0 where `loss_mask` is false.

        Args:
            model: a model set up by `prepare`.
            samples: the sequences.
            token_budget: tokens of a micro-batch, at most.
            progress: called after every micro-batch.
            routers: routers of the model, to replay recorded experts.

        Raises:
            ValueError: a sequence is empty, or longer than the budget.
        """
        found = [np.zeros(len(sample), np.float32) for sample in samples]
        for indices in micro_batches(lengths_of(samples), token_budget=token_budget):
            part = self.part(samples, indices)
            if part.width:
                scored = self.logprobs(model, part, routers=routers).cpu().numpy()
                for row, index in enumerate(indices):
                    found[index][samples[index].loss_mask] = scored[row, : samples[index].trained]
            progress()
        return found
