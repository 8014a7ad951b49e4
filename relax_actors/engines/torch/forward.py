"""Log-probs or values of sequences under a torch model: the forward pass that training and scoring share.

A result depends on the weights and the micro-batch. The same sequences in one micro-batch give the same bits in any
process; in other micro-batches they differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from relax_actors.algorithms.vocabulary import Head, score_tokens, score_top, squared_probabilities
from relax_actors.engines.protocols.samples import MicroBatchPlan, TrainSample
from relax_actors.engines.protocols.scoring import Scores
from relax_actors.engines.torch import multimodal
from relax_actors.engines.torch.barred import BarredIds
from relax_actors.engines.torch.experts import Routers
from relax_actors.engines.torch.head import HeadForm
from relax_actors.engines.torch.loss_inputs import ScoredTokens
from relax_actors.engines.torch.micro_batch import IDLE, MicroBatch
from relax_actors.engines.torch.packing import ATTENTION, Packing, is_recurrent
from relax_actors.engines.torch.planning import Planning
from relax_actors.engines.torch.sharding import Whole
from relax_actors.media.family import Family

T = TypeVar("T")


class Forward(Planning):
    """Packs sequences into micro-batches and computes their log-probs with a model.

    Args:
        place: device of the models, or how ranks share the models, and thereby the micro-batches.
        dtype: dtype of the computation; other than float32 it uses autocast, with the weights in float32.
        temperature: divisor of the logits.
        family: family of the models; None if they read text only.
        share_prefixes: compute a prefix that sequences of a row share once in a micro-batch.
        keeps_rows: one rank computes all sequences of a row.
        head_dtype: dtype of the computation of logits; that of the rest by default.
        scores: whether the models compute scores in place of log-probs of tokens.
    """

    def __init__(
        self,
        place: torch.device | Whole,
        dtype: torch.dtype,
        temperature: float,
        family: Family | None = None,
        *,
        share_prefixes: bool = True,
        keeps_rows: bool = False,
        head_dtype: torch.dtype | None = None,
        scores: bool = False,
    ) -> None:
        sharding = place if isinstance(place, Whole) else Whole(place)
        super().__init__(sharding, family, share_prefixes=share_prefixes, keeps_rows=keeps_rows)
        self.device, self._dtype, self._temperature = sharding.device, dtype, temperature
        self._barred, self._head_form, self._head_dtype = (
            BarredIds(family, self.device),
            HeadForm(),
            head_dtype or dtype,
        )
        self._computes_scores = scores

    def prepare(self, model: PreTrainedModel) -> PreTrainedModel:
        """Prepare a policy or a model of scores for packed sequences, disable dropout, and return it.

        Raises:
            ConfigError: its log-probs cannot be computed from its hidden states; see `HeadForm`.
        """
        self.prepare_critic(model)
        if self._computes_scores:
            return model
        text = None if self._family is not None else partial(self._hidden_states, model)
        # Ranks gather layers in the dtype of the computation.
        casts = self._dtype != torch.float32 and not self._sharding.is_whole
        with torch.no_grad(), torch.autocast(self.device.type, self._dtype, enabled=casts):
            self._head_form = self._sharding.within(model, partial(HeadForm.of, model, text, self.device))
        return model

    def prepare_critic(self, model: PreTrainedModel) -> PreTrainedModel:
        """Prepare a model with a value head as `prepare` does."""
        decoder = model if self._family is None else multimodal.decoder_of(model)
        decoder.set_attn_implementation(ATTENTION)
        self._alone = is_recurrent(decoder)
        model.train(mode=False)
        return model

    def loss(
        self, model: PreTrainedModel, loss_of: Callable[[MicroBatchPlan], tuple[Tensor, dict[str, float]]]
    ) -> Callable[[MicroBatchPlan], tuple[Tensor, dict[str, float]]]:
        """Return a function that computes the loss of a micro-batch; that of an idle one is 0."""

        def compute(plan: MicroBatchPlan) -> tuple[Tensor, dict[str, float]]:
            if not plan.indices:
                return self._idle(model) + self._sharding.zero(model, "rest"), {}
            loss, measured = loss_of(plan)
            return loss + self._sharding.zero(model, "towers"), measured

        if self._sharding.is_whole:
            return loss_of
        return lambda plan: self._sharding.within(model, partial(compute, plan))

    def without_loss(
        self, model: PreTrainedModel, plan: MicroBatchPlan, compute: Callable[[MicroBatchPlan], T], nothing: T
    ) -> T:
        """Compute with the sequences of a micro-batch, without gradients; an idle one gives `nothing`."""

        def run() -> T:
            if plan.indices:
                return compute(plan)
            self._idle(model)
            return nothing

        return self._sharding.within(model, run) if plan.indices or not self._sharding.is_whole else nothing

    def _idle(self, model: PreTrainedModel) -> Tensor:
        """Compute embeddings and layers of one token; returns a 0 that depends on them and on the head."""
        token = TrainSample.of_completion(np.zeros(1, np.int32), np.zeros(1, np.int32))
        hidden = self._scored_states(model, self.micro_batch([token], MicroBatchPlan.of([0])))
        return self._sharding.at_head(model, hidden, lambda s: 0.0 * s.sum() + self._sharding.zero(model, "head"))

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
        logprobs, *_ = self._scores(model, hidden, batch.targets, divisor)
        return batch.laid_out(logprobs[:, 0])

    def score_trained(
        self,
        model: PreTrainedModel,
        batch: MicroBatch,
        *,
        entropies: bool = False,
        ids: Tensor | None = None,
        squares: bool = False,
        routers: Routers | None = None,
    ) -> ScoredTokens:
        """Compute log-probs of the trained tokens as `logprobs` does, or their scores, and what else the loss needs.

        Args:
            model: a model set up by `prepare`.
            batch: the micro-batch.
            entropies: whether to compute entropies over the vocabulary.
            ids: `[batch, width, k] int64`, tokens whose log-probs are needed at the place of each trained token.
            squares: whether to compute sums of squared probabilities.
            routers: routers of the model, to replay the recorded experts.
        """
        if self._computes_scores:
            scores = self.scores(model, batch)
            return ScoredTokens(scores[..., 0], scores=scores)
        tokens = batch.targets if ids is None else torch.cat([batch.targets, ids.flatten(0, 1)[batch.places]], -1)
        hidden, wanted = self._scored_states(model, batch, routers), {"entropies": entropies, "squares": squares}
        logprobs, *of_vocabulary = self._scores(model, hidden, tokens, self._temperature, **wanted)
        entropy, square = (None if values is None else batch.laid_out(values) for values in of_vocabulary)
        top = None if ids is None else batch.laid_out(logprobs[:, 1:])
        return ScoredTokens(batch.laid_out(logprobs[:, 0]), entropy, top, square)

    def _scores(
        self, model: PreTrainedModel, hidden: Tensor, ids: Tensor, temperature: float, **wanted: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute log-probs `[trained, k]`, `entropies` and `squares` `[trained]` within one `at_head`."""

        def score(states: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
            head = self._head(model)
            scores = score_tokens(states, ids, temperature, head=head, entropies=wanted.get("entropies", False))
            squares = squared_probabilities(states, temperature, head=head) if wanted.get("squares") else None
            return scores.logprobs, scores.entropies, squares

        return self._sharding.at_head(model, hidden, score)

    def squares(self, model: PreTrainedModel, batch: MicroBatch, *, routers: Routers | None = None) -> Tensor:
        """Compute the sum of squared probabilities at the trained tokens, `[batch, width] float32`, as `logprobs`."""
        hidden = self._scored_states(model, batch, routers)
        square = partial(squared_probabilities, temperature=self._temperature)
        return batch.laid_out(self._sharding.at_head(model, hidden, lambda s: square(s, head=self._head(model))))

    def _head(self, model: PreTrainedModel) -> Head:
        return self._head_form.head(model, self._barred.ids, self._head_dtype)

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
        return cast("Tensor", model.base_model(input_ids=tokens, **settings).last_hidden_state)

    @staticmethod
    def _states_with_media(model: PreTrainedModel, family: Family, batch: MicroBatch) -> Tensor:
        encoded = multimodal.encode_placed(model, family, batch.placement)
        settings = {"position_ids": batch.positions, "packing": batch.packing, "use_cache": False}
        return multimodal.hidden_states(model, batch.tokens, batch.placement, encoded, **settings)

    def values(self, model: PreTrainedModel, batch: MicroBatch) -> Tensor:
        """Compute the value before each trained token, `[batch, width] float32`, by a model of `prepare_critic`."""
        with torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32):
            if self._family is not None:
                values = model.lm_head(self._states_with_media(model, self._family, batch)[0, batch.scored])
            else:
                settings = {"position_ids": batch.packing.positions, "packing": batch.packing, "use_cache": False}
                values = model(input_ids=batch.tokens, **settings).logits[0, batch.scored]
        return batch.laid_out(values[:, 0].float())

    def scores(self, model: PreTrainedModel, batch: MicroBatch) -> Tensor:
        """Compute the scores of answers or steps, `[batch, width, classes] float32`, by a linear head `score`.

        They are 0 where `batch.mask` is false.
        """
        head: Any = model.score
        hidden, casts = self._scored_states(model, batch), self._head_dtype != torch.float32

        def compute(states: Tensor) -> Tensor:
            with torch.autocast(self.device.type, self._head_dtype, enabled=casts):
                found: Tensor = head(states if casts else states.to(head.weight.dtype))
            return found.to(torch.promote_types(found.dtype, torch.float32))

        return batch.laid_out(self._sharding.at_head(model, hidden, compute))

    def score(
        self,
        model: PreTrainedModel,
        samples: Sequence[TrainSample],
        max_tokens: int,
        progress: Callable[[], None],
        routers: Routers | None = None,
    ) -> list[NDArray[Any]]:
        """Compute log-probs of each sequence, `[len] float32`, 0 where `loss_mask` is false.

        A micro-batch has at most `max_tokens`, and `progress` is called after it; `routers` replay recorded experts.

        Raises:
            ValueError: a sequence is empty, or longer than `max_tokens`.
        """
        return self.compute(
            model, lambda batch: self.logprobs(model, batch, routers=routers), samples, max_tokens, progress
        )

    @torch.no_grad()
    def compute(
        self,
        model: PreTrainedModel,
        compute: Callable[[MicroBatch], Tensor],
        samples: Sequence[TrainSample],
        max_tokens: int,
        progress: Callable[[], None],
    ) -> list[NDArray[Any]]:
        """Compute numbers for each trained token, micro-batch by micro-batch and without gradients; see `score`.

        `compute` returns those of a micro-batch, `[batch, width]` or `[batch, width, k] float32`. Returns an array
        `[len]` or `[len, k] float32` for each sequence.
        """

        def numbers(plan: MicroBatchPlan) -> NDArray[Any]:
            of_batch: NDArray[Any] = compute(self.micro_batch(samples, plan)).cpu().numpy()
            return of_batch

        own: list[tuple[int, NDArray[Any]]] = []
        for plan in self.plan(samples, max_tokens):
            trained = plan if any(samples[index].trained for index in plan.indices) else IDLE
            scored = self.without_loss(model, trained, numbers, np.zeros((0, 0), np.float32))
            own += [(i, row[: samples[i].trained]) for i, row in zip(trained.indices, scored, strict=True)]
            progress()
        arrays = [np.zeros(len(sample), np.float32) for sample in samples]
        for index, row in (pair for part in self._sharding.all_gather(own) for pair in part):
            arrays[index] = np.zeros((len(samples[index]), *row.shape[1:]), np.float32)
            arrays[index][samples[index].loss_mask] = row
        return arrays

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
        scores: dict[int, Scores] = {}
        for plan in self.plan(samples, max_tokens):
            batch = self.micro_batch(samples, plan)
            hidden, targets = self._scored_states(model, batch), batch.targets[:, 0]
            of_targets, ids, top = score_top(hidden, targets, top_k, self._temperature, head=self._head(model))
            scored = batch.laid_out(of_targets).cpu().numpy()
            ends = np.cumsum([samples[index].trained for index in plan.indices])
            for row, (index, end) in enumerate(zip(plan.indices, ends, strict=True)):
                sample = samples[index]
                part, logprobs = slice(end - sample.trained, end), np.zeros(len(sample), np.float32)
                logprobs[sample.loss_mask] = scored[row, : sample.trained]
                scores[index] = Scores(logprobs, ids[part].int().cpu().numpy(), top[part].cpu().numpy())
            progress()
        return [scores[index] for index in range(len(samples))]
