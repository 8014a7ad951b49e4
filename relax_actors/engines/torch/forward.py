"""Log-probs or values of sequences under a torch model: the forward pass that training and scoring share.

A result depends on the weights and the micro-batch. The same sequences in one micro-batch give the same bits in any
process; in other micro-batches they differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from relax_actors.algorithms.vocabulary import Head, score_tokens, score_top, squared_probabilities
from relax_actors.devices.binding import own_device
from relax_actors.engines.protocols.samples import MicroBatchPlan, TrainSample, input_lengths, plan_micro_batches
from relax_actors.engines.protocols.scoring import Scores
from relax_actors.engines.torch import multimodal
from relax_actors.engines.torch.barred import BarredIds
from relax_actors.engines.torch.experts import Routers, pack_experts
from relax_actors.engines.torch.head import HeadForm
from relax_actors.engines.torch.micro_batch import MicroBatch
from relax_actors.engines.torch.multimodal import Placement
from relax_actors.engines.torch.objective import ScoredTokens
from relax_actors.engines.torch.packing import ATTENTION, Packing
from relax_actors.media.family import Family


def device_of(name: str) -> torch.device:
    """Return the torch device of a setting; "auto" is CUDA where available, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(own_device(name))


class Forward:
    """Packs sequences into micro-batches and computes their log-probs with a model.

    Args:
        device: device of the models.
        dtype: dtype of the computation; other than float32 it uses autocast, with the weights in float32.
        temperature: divisor of the logits.
        family: family of the models; None if they read text only.
        share_prefixes: compute a prefix that sequences of a row share once in a micro-batch.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        temperature: float,
        family: Family | None = None,
        *,
        share_prefixes: bool = True,
    ) -> None:
        self.device, self._dtype, self._temperature, self._family = device, dtype, temperature, family
        self._share_prefixes = share_prefixes
        self._barred = BarredIds(family, device)
        self._head_form = HeadForm()

    def prepare(self, model: PreTrainedModel) -> PreTrainedModel:
        """Prepare a policy for packed sequences, disable dropout, and return it.

        Raises:
            ConfigError: its log-probs cannot be computed from its hidden states; see `HeadForm`.
        """
        self.prepare_critic(model)
        text = None if self._family is not None else partial(self._hidden_states, model)
        self._head_form = HeadForm.of(model, text)
        return model

    def prepare_critic(self, model: PreTrainedModel) -> PreTrainedModel:
        """Prepare a model with a value head as `prepare` does."""
        decoder = model if self._family is None else multimodal.decoder_of(model)
        decoder.set_attn_implementation(ATTENTION)
        model.train(mode=False)
        return model

    def plan(self, samples: Sequence[TrainSample], max_tokens: int) -> list[MicroBatchPlan]:
        """Split sequences into micro-batches of at most `max_tokens` tokens.

        Raises:
            ValueError: a sequence is empty, or longer than `max_tokens`.
        """
        return plan_micro_batches(samples, max_tokens, share_prefixes=self._share_prefixes)

    def micro_batch(self, samples: Sequence[TrainSample], plan: MicroBatchPlan) -> MicroBatch:
        """Build the micro-batch of the sequences that a plan names."""
        chosen, shared = [samples[index] for index in plan.indices], plan.shared
        lengths = input_lengths(chosen)
        packing = Packing.of(lengths, self.device, shared)
        trained = [np.flatnonzero(sample.loss_mask) for sample in chosen]
        counts = np.array([len(places) for places in trained])
        mask = np.arange(counts.max()) < counts[:, None]
        scored = [path[places - 1] for path, places in zip(packing.paths, trained, strict=True)]
        targets = [sample.token_ids[places] for sample, places in zip(chosen, trained, strict=True)]
        tokens = [s.token_ids[prefix:length] for s, prefix, length in zip(chosen, shared, lengths, strict=True)]
        ids = [np.concatenate(arrays).astype(np.int64) for arrays in (tokens, scored, targets)]
        on = [torch.from_numpy(array).to(self.device) for array in (*ids, np.flatnonzero(mask), mask)]
        experts = self._experts(chosen, packing)
        batch = MicroBatch(on[0][None], packing, on[1], on[2][:, None], on[3], on[4], experts)
        return batch if self._family is None else self._with_media(batch, self._family, chosen, shared)

    def _with_media(
        self, batch: MicroBatch, family: Family, samples: Sequence[TrainSample], shared: Sequence[int]
    ) -> MicroBatch:
        """Add the rotary positions and the media of the sequences."""
        positions = multimodal.positions_of([(s.inputs, s.media) for s in samples], shared)[:, None]
        sequences = [(sample.token_ids, sample.media) for sample in samples]
        placement = Placement.of(family, sequences, batch.packing.paths, self.device)
        return replace(batch, positions=torch.from_numpy(positions).to(self.device), placement=placement)

    def _experts(self, samples: Sequence[TrainSample], packing: Packing) -> Tensor | None:
        """Lay out recorded experts; a sequence without any leaves its choices to the routers."""
        known = [
            (sample.routed_experts, path)
            for path, sample in zip(packing.paths, samples, strict=True)
            if sample.routed_experts is not None
        ]
        if not known:
            return None
        total = packing.positions.shape[1]
        packed = pack_experts([experts for experts, _ in known], [path for _, path in known], total)
        return torch.from_numpy(packed).to(self.device)

    def padded(self, arrays: Sequence[NDArray[Any]], width: int) -> Tensor:
        """Pad values of the trained tokens of each sequence with 0.

        Args:
            arrays: `[trained]` or `[trained, k]` of each sequence, numbers or token ids.
            width: largest number of trained tokens.

        Returns:
            `[batch, width]` or `[batch, width, k]`, float32 or, for ids, int64.
        """
        dtype = np.int64 if arrays[0].dtype.kind == "i" else np.float32
        out = np.zeros((len(arrays), width, *arrays[0].shape[1:]), dtype)
        for row, array in enumerate(arrays):
            out[row, : len(array)] = array
        return torch.from_numpy(out).to(self.device)

    def logprobs(
        self,
        model: PreTrainedModel,
        batch: MicroBatch,
        temperature: float | None = None,
        *,
        routers: Routers | None = None,
        only_count: bool = False,
    ) -> Tensor:
        """Compute log-probs of the trained tokens, `[batch, width] float32`, 0 where `batch.mask` is false.

        Args:
            model: a model set up by `prepare`.
            batch: the micro-batch.
            temperature: divisor of the logits; None for the temperature of the run.
            routers: routers of the model, to replay the recorded experts.
            only_count: let the routers make their own choice, and only count differences from the recorded experts.
        """
        divisor = self._temperature if temperature is None else temperature
        hidden = self._scored_states(model, batch, routers, only_count=only_count)
        scores = score_tokens(hidden, batch.targets, divisor, head=self._head(model))
        return self._in_padded_layout(scores.logprobs[:, 0], batch)

    def score_trained(
        self,
        model: PreTrainedModel,
        batch: MicroBatch,
        *,
        entropies: bool = False,
        ids: Tensor | None = None,
        routers: Routers | None = None,
    ) -> ScoredTokens:
        """Compute log-probs of the trained tokens as `logprobs` does, and what else the loss needs.

        Args:
            model: a model set up by `prepare`.
            batch: the micro-batch.
            entropies: whether to compute entropies over the vocabulary.
            ids: `[batch, width, k] int64`, tokens whose log-probs are needed at the place of each trained token.
            routers: routers of the model, to replay the recorded experts.
        """
        tokens = batch.targets
        if ids is not None:
            tokens = torch.cat([tokens, ids.flatten(0, 1)[batch.places]], -1)
        hidden = self._scored_states(model, batch, routers)
        scores = score_tokens(hidden, tokens, self._temperature, head=self._head(model), entropies=entropies)
        return ScoredTokens(
            self._in_padded_layout(scores.logprobs[:, 0], batch),
            None if scores.entropies is None else self._in_padded_layout(scores.entropies, batch),
            None if ids is None else self._in_padded_layout(scores.logprobs[:, 1:], batch),
        )

    def squares(self, model: PreTrainedModel, batch: MicroBatch, *, routers: Routers | None = None) -> Tensor:
        """Compute the sum of squared probabilities at the trained tokens, `[batch, width] float32`, as `logprobs`."""
        hidden = self._scored_states(model, batch, routers)
        return self._in_padded_layout(squared_probabilities(hidden, self._temperature, head=self._head(model)), batch)

    def _head(self, model: PreTrainedModel) -> Head:
        return self._head_form.head(model, self._barred.ids, self._dtype)

    def _scored_states(
        self, model: PreTrainedModel, batch: MicroBatch, routers: Routers | None = None, *, only_count: bool = False
    ) -> Tensor:
        """Compute the hidden states before the trained tokens, `[trained, hidden]`."""
        replaying: AbstractContextManager[None] = nullcontext()
        if routers is not None and batch.experts is not None:
            replaying = routers.replaying(batch.experts, only_count=only_count)
        with replaying, torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32):
            if self._family is None:
                hidden = self._hidden_states(model, batch.tokens, batch.packing)
            else:
                hidden = self._states_with_media(model, self._family, batch)
        return hidden[0].index_select(0, batch.scored)

    @staticmethod
    def _hidden_states(model: PreTrainedModel, tokens: Tensor, packing: Packing) -> Tensor:
        """Run the decoder of a model that reads text, `[1, total, hidden]`."""
        settings = {"position_ids": packing.positions, "packing": packing, "use_cache": False}
        hidden: Tensor = model.base_model(input_ids=tokens, **settings).last_hidden_state
        return hidden

    @staticmethod
    def _states_with_media(model: PreTrainedModel, family: Family, batch: MicroBatch) -> Tensor:
        encoded = multimodal.encode_placed(model, family, batch.placement)
        settings = {"position_ids": batch.positions, "packing": batch.packing, "use_cache": False}
        return multimodal.hidden_states(model, batch.tokens, batch.placement, encoded, **settings)

    def values(self, model: PreTrainedModel, batch: MicroBatch) -> Tensor:
        """Compute the value of the state before each trained token, `[batch, width] float32`, as `logprobs`.

        Args:
            model: model with a head for one number instead of tokens, set up by `prepare_critic`.
            batch: the micro-batch.
        """
        with torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32):
            if self._family is not None:
                values = model.lm_head(self._states_with_media(model, self._family, batch)[0, batch.scored])
            else:
                settings = {"position_ids": batch.packing.positions, "packing": batch.packing, "use_cache": False}
                values = model(input_ids=batch.tokens, **settings).logits[0, batch.scored]
        return self._in_padded_layout(values[:, 0].float(), batch)

    @staticmethod
    def _in_padded_layout(found: Tensor, batch: MicroBatch) -> Tensor:
        """Lay out `[trained, ...]` as `[batch, width, ...]`."""
        padded = found.new_zeros((batch.mask.numel(), *found.shape[1:]))
        return padded.index_copy(0, batch.places, found).view(*batch.mask.shape, *found.shape[1:])

    def score(
        self,
        model: PreTrainedModel,
        samples: Sequence[TrainSample],
        max_tokens: int,
        progress: Callable[[], None],
        routers: Routers | None = None,
    ) -> list[NDArray[Any]]:
        """Compute log-probs of each sequence, `[len] float32`, 0 where `loss_mask` is false.

        Args:
            model: a model set up by `prepare`.
            samples: the sequences.
            max_tokens: largest number of tokens of a micro-batch.
            progress: called after every micro-batch.
            routers: routers of the model, to replay recorded experts.

        Raises:
            ValueError: a sequence is empty, or longer than `max_tokens`.
        """
        return self.compute(lambda batch: self.logprobs(model, batch, routers=routers), samples, max_tokens, progress)

    @torch.no_grad()
    def compute(
        self,
        compute: Callable[[MicroBatch], Tensor],
        samples: Sequence[TrainSample],
        max_tokens: int,
        progress: Callable[[], None],
    ) -> list[NDArray[Any]]:
        """Compute a number for each trained token, micro-batch by micro-batch and without gradients; see `score`.

        Args:
            compute: returns the numbers of a micro-batch, `[batch, width] float32`.
            samples: the sequences.
            max_tokens: largest number of tokens of a micro-batch.
            progress: called after every micro-batch.
        """
        found = [np.zeros(len(sample), np.float32) for sample in samples]
        for plan in self.plan(samples, max_tokens):
            batch = self.micro_batch(samples, plan)
            if batch.width:
                scored = compute(batch).cpu().numpy()
                for row, index in enumerate(plan.indices):
                    found[index][samples[index].loss_mask] = scored[row, : samples[index].trained]
            progress()
        return found

    @torch.no_grad()
    def score_top(
        self,
        model: PreTrainedModel,
        samples: Sequence[TrainSample],
        max_tokens: int,
        top_k: int,
        progress: Callable[[], None],
    ) -> list[Scores]:
        """Compute log-probs of each sequence as `score` does, and the `top_k` most likely tokens; errors as `score`."""
        found: dict[int, Scores] = {}
        for plan in self.plan(samples, max_tokens):
            batch = self.micro_batch(samples, plan)
            hidden, targets = self._scored_states(model, batch), batch.targets[:, 0]
            of_targets, ids, top = score_top(hidden, targets, top_k, self._temperature, head=self._head(model))
            scored = self._in_padded_layout(of_targets, batch).cpu().numpy()
            ends = np.cumsum([samples[index].trained for index in plan.indices])
            for row, (index, end) in enumerate(zip(plan.indices, ends, strict=True)):
                sample = samples[index]
                part, logprobs = slice(end - sample.trained, end), np.zeros(len(sample), np.float32)
                logprobs[sample.loss_mask] = scored[row, : sample.trained]
                found[index] = Scores(logprobs, ids[part].int().cpu().numpy(), top[part].cpu().numpy())
            progress()
        return [found[index] for index in range(len(samples))]
