"""Loss of an optimizer step from log-probs, shared by all engines that train with torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.controllers import Coefficients, applied_entropy
from relax_actors.algorithms.corrections import (
    depth_metrics,
    kept_by_opsm,
    kept_sequences,
    mismatch_metrics,
    ratio_quantiles,
)
from relax_actors.algorithms.distillation import distillation_loss, sampled_reverse_kl
from relax_actors.algorithms.kl import kl_penalty
from relax_actors.algorithms.losses import MAX_LOG_RATIO, reduce_loss
from relax_actors.algorithms.policy import PolicyInputs, PolicyLoss
from relax_actors.algorithms.policy_functions import PolicyFunctions
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.engines.torch.loss_inputs import LossInputs
from relax_actors.engines.torch.observations import observation_loss, of_policy
from relax_actors.engines.torch.replay_metrics import with_replay_shares
from relax_actors.engines.torch.step_means import OF_SAMPLES, other_measurements, step_means


class StepObjective:
    """Loss of one optimizer step, micro-batch by micro-batch.

    The loss of a micro-batch is a sum. The accumulated gradients are divided once, before the optimizer's step, because
    the divisor is known only after the last row has arrived and its last sequence was kept or rejected.

    Args:
        algorithm: section [algorithm] of the run.
        coefficients: coefficients of the step; those of the first step if None.

    Attributes:
        log_ratios: `[tokens] float32` of each micro-batch so far; data-parallel ranks gather them.

    Raises:
        ValueError: `algorithm.aggregate` is "constant", and `algorithm.length` is not set.
        ConfigError: a function of the user does not import, or names a setting that [algorithm] lacks.
    """

    def __init__(self, algorithm: AlgorithmSection, coefficients: Coefficients | None = None) -> None:
        if algorithm.aggregate == "constant" and algorithm.length is None:
            msg = 'algorithm.aggregate = "constant" needs algorithm.length; a Config sets it to rollout.max_tokens'
            raise ValueError(msg)
        self._algorithm, self._functions = algorithm, PolicyFunctions(algorithm)
        self._coefficients = coefficients or Coefficients(algorithm.kl.coefficient, algorithm.entropy.coefficient)
        self.log_ratios: list[NDArray[Any]] = []

    @property
    def functions(self) -> PolicyFunctions:
        """Functions that [algorithm] names."""
        return self._functions

    @property
    def needs_whole_step(self) -> bool:
        """Whether the loss needs numbers of the whole step, so that no backward pass can start before."""
        algorithm = self._algorithm
        wide = algorithm.entropy.quantile < 1 or algorithm.correction.normalise != "none"
        return wide or self._functions.spec.needs_whole_step or algorithm.pairs_need_whole_step

    @property
    def needs_sample_sums(self) -> bool:
        """Whether the loss of a token depends on all tokens of its sample."""
        return self._algorithm.ratio.startswith("sequence") or self._functions.needs_sample_sums

    @property
    def needs_row_sums(self) -> bool:
        """Whether the loss of a token depends on all samples of its row."""
        return self._functions.spec.over_row

    @property
    def reads_squares(self) -> bool:
        """Whether the loss reads the sums of squared probabilities of the trained policy."""
        return self._algorithm.loss_reads_squares

    @property
    def trains_entropy(self) -> bool:
        """Whether the loss has an entropy bonus; only then do entropies get a gradient."""
        return self._algorithm.entropy.coefficient > 0 or self._algorithm.entropy.target is not None

    @property
    def top_entropy(self) -> float | None:
        """Share of the tokens, by entropy, that the policy loss trains; None for all."""
        share = self._algorithm.entropy.quantile
        return share if share < 1 else None

    @property
    def means_selected(self) -> bool:
        """Whether the ratio of a sample is the mean over its tokens of the highest entropies."""
        return self.top_entropy is not None and self._functions.spec.over_sample == "mean"

    @property
    def needs_teacher(self) -> bool:
        """Whether `LossInputs.teacher` is required."""
        return self._algorithm.distil.place == "loss"

    def _distilled(self, inputs: LossInputs) -> Tensor:
        """Return the distillation loss of each token, `[batch, width] float32`."""
        settings, teacher = self._algorithm.distil, inputs.teacher
        if teacher is None:
            msg = 'algorithm.distil.place is "loss", but the batch lacks a teacher\'s log-probs; add the role teacher'
            raise ValueError(msg)
        if teacher.top is None or teacher.student_top is None:
            return sampled_reverse_kl(inputs.logprobs, teacher.logprobs)
        return distillation_loss(
            teacher.student_top,
            teacher.top,
            kind=settings.kind,
            tail=settings.tail,
            teacher_weight=settings.teacher_weight,
        )

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, float]]:
        """Compute the loss of a micro-batch.

        Returns:
            Sum of the loss, scalar float32, and measurements to combine with `add_metrics`.

        Raises:
            ValueError: shapes do not match, or an input is missing.
            ConfigError: a function of the user returned a wrong shape, or a number that is not finite.
        """
        observations, inputs = observation_loss(inputs), of_policy(inputs)
        algorithm, mask = self._algorithm, inputs.mask
        logprobs, rollout = inputs.logprobs, inputs.rollout
        if algorithm.rows == "sampled":
            measured = mismatch_metrics(logprobs, rollout, mask) | depth_metrics(logprobs, rollout, mask)
            self.log_ratios.append((logprobs.detach() - rollout)[mask].cpu().numpy())
        else:
            measured = {"tokens": float(mask.sum())}
        per_token = self._policy_term(inputs, measured)
        for term in self._other_terms(inputs, measured):
            per_token = per_token + term
        measured["samples"] = float(self._shares(inputs, inputs.counts).sum())
        trained = self._trained_tokens(inputs, measured)
        mode, tokens = algorithm.aggregate, inputs.sample_tokens
        if mode == "prompt_mean":
            tokens = inputs.row_counts
            measured["prompts"] = float(self._shares(inputs, tokens).sum())
        loss = reduce_loss(per_token, trained, mode=mode, normaliser=1.0, tokens=tokens)
        if observations is not None:
            loss = loss + observations[0]
            measured |= observations[1]
        measured["loss"] = float(loss.detach())
        if inputs.scores is None:
            measured["entropy_proxy"] = float(-(logprobs.detach() * mask).sum())
        return loss, measured

    @torch.no_grad()
    def observe(self, inputs: LossInputs) -> PolicyLoss:
        """Compute the policy loss in the forward pass before the backward pass; fills `inputs.totals`."""
        chosen = torch.zeros_like(inputs.mask) if self._functions.spec.choose else None
        return self._functions.policy_loss(self._policy_inputs(of_policy(inputs), chosen, {}))

    def _proximal(self, inputs: LossInputs) -> Tensor:
        """Return the log-probs in the denominator of the ratio, detached.

        With one update a batch, the trainer's log-probs before the step are those of this pass.
        """
        if self._algorithm.proximal == "rollout":
            return inputs.rollout.detach()
        if inputs.proximal is not None:
            return inputs.proximal.detach()
        if self._algorithm.proximal == "actor_fwd":
            msg = 'algorithm.proximal is "actor_fwd", but the batch lacks its log-probs; add the role actor_fwd'
            raise ValueError(msg)
        return inputs.logprobs.detach()

    def _policy_inputs(self, inputs: LossInputs, selected: Tensor | None, measured: dict[str, float]) -> PolicyInputs:
        proximal = self._proximal(inputs)
        return PolicyInputs.of(
            inputs.logprobs,
            proximal,
            inputs.advantages,
            inputs.mask,
            level=self._algorithm.ratio,
            rollout=inputs.rollout,
            weights=self._weights(inputs, proximal, measured),
            sample_tokens=inputs.sample_tokens,
            selected=selected,
            totals=inputs.totals,
            reference=inputs.reference,
            row_tokens=inputs.row_counts,
            squares=inputs.squares,
            scores=inputs.scores,
            targets=inputs.targets,
        )

    @property
    def _weighs_trained_policy(self) -> bool:
        """Whether the distance from the rollout is that of the trained policy, and not of the proximal one.

        Against the rollout itself the distance of the proximal policy is 0. The score has no ratio that covers the
        rest of the way.
        """
        return self._algorithm.proximal == "rollout" or self._functions.spec.ratio == "none"

    def _weights(self, inputs: LossInputs, proximal: Tensor, measured: dict[str, float]) -> Tensor:
        """Return the weights of the off-policy correction, 1 without one."""
        settings, mask, totals = self._algorithm.correction, inputs.mask, inputs.totals
        if settings.kind == "none":
            return torch.ones_like(inputs.rollout)
        near = inputs.logprobs.detach() if self._weighs_trained_policy else proximal
        corrected = self._functions.weights(near, inputs.rollout, mask)
        weights = corrected.weight
        if settings.normalise != "none":
            each = torch.ones_like(weights, dtype=torch.float64)
            if settings.normalise == "samples":
                each = each / inputs.counts.clamp(min=1).unsqueeze(-1)
            mean = totals.step_sum("weights", weights * each, mask) / totals.step_sum("weighted", each, mask)
            weights = weights / mean if mean > 0 else weights
        measured["weight"] = float((weights * mask).sum())
        measured["bounded"] = float((corrected.bounded & mask).sum())
        return weights

    def _policy_term(self, inputs: LossInputs, measured: dict[str, float]) -> Tensor:
        algorithm, mask = self._algorithm, inputs.mask
        selected = inputs.uncertain if self.means_selected else inputs.selected
        given = self._policy_inputs(inputs, selected, measured)
        policy = self._functions.policy_loss(given)
        measured["clipped"] = float((policy.clipped & mask).sum())
        shares = self._shares(inputs, inputs.counts)
        measured |= {f"{OF_SAMPLES}{name}": float((values * shares).sum()) for name, values in policy.measured.items()}
        loss = policy.loss
        if algorithm.correction.kind != "none" and not policy.weighted:
            loss = loss * given.weights
        if (threshold := algorithm.reject.opsm) is not None:
            kept = kept_by_opsm(given.logprobs, given.proximal, given.advantages, mask, threshold=threshold)
            measured["opsm_dropped"] = float((~kept).sum())
            loss = loss.masked_fill(~kept.unsqueeze(-1), 0.0)
        if inputs.uncertain is not None:
            loss = loss.masked_fill(~inputs.uncertain, 0.0)
        return loss

    def _other_terms(self, inputs: LossInputs, measured: dict[str, float]) -> Iterator[Tensor]:
        """Yield the terms of each token's loss besides the policy loss; a term with coefficient 0 has no graph."""
        algorithm, mask, logprobs, kl = self._algorithm, inputs.mask, inputs.logprobs, self._algorithm.kl
        if inputs.reference is not None and kl.place == "loss":
            term = kl_penalty(
                logprobs,
                inputs.reference,
                kind=kl.kind,
                clamp=kl.clamp,
                k2_gradient=kl.k2_gradient,
                proximal=self._proximal(inputs) if kl.unbiased else None,
            )
            measured["kl"] = float((term.detach() * mask).sum())
            yield self._coefficients.kl * term
        if self.needs_teacher:
            distilled = self._distilled(inputs)
            measured["distil"] = float((distilled.detach() * mask).sum())
            yield algorithm.distil.coefficient * distilled
        if self.trains_entropy:
            if inputs.entropies is None:
                msg = "the entropy bonus of [algorithm.entropy] needs the entropies of the tokens; the engine gave none"
                raise ValueError(msg)
            measured["entropy"] = float((inputs.entropies.detach() * mask).sum())
            if bonus := applied_entropy(self._coefficients, algorithm.entropy.target):
                yield -bonus * inputs.entropies
        if inputs.imitated is not None and algorithm.positive_nll:
            imitation = -inputs.imitated * logprobs
            measured["positive_nll"] = float((imitation.detach() * mask).sum())
            yield imitation
        if penalty := algorithm.log_ratio_penalty:
            delta = logprobs - self._proximal(inputs)
            yield penalty * delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square()

    @staticmethod
    def _shares(inputs: LossInputs, tokens: Tensor) -> Tensor:
        """Return the trained tokens of each sequence over the tokens of its sample or prompt, `[batch] float64`."""
        return inputs.mask.sum(-1).double() / tokens.clamp(min=1)

    def _trained_tokens(self, inputs: LossInputs, measured: dict[str, float]) -> Tensor:
        """Return the mask without rejected sequences, whose ratios are too far from 1."""
        algorithm, mask, reject = self._algorithm, inputs.mask, self._algorithm.reject
        if reject.kind == "none":
            return mask
        near = inputs.logprobs if self._weighs_trained_policy else self._proximal(inputs)
        bounds: dict[str, float] = {"low": reject.low, "high": reject.high, "max_kl": reject.max_kl}
        kept = kept_sequences(near, inputs.rollout, mask, kind=reject.kind, **bounds)
        trained = mask & kept.unsqueeze(-1)
        measured["rejected"] = float((~kept).sum())
        if reject.counted:
            return trained
        if algorithm.aggregate == "token_mean":
            measured["trained"] = float(trained.sum())
        else:
            tokens = inputs.row_counts if algorithm.aggregate == "prompt_mean" else inputs.counts
            measured["trained"] = float((self._shares(inputs, tokens) * kept).sum())
        return trained

    def gradient_scale(self, measured: dict[str, float]) -> float:
        """Return the factor for the accumulated gradients: 1 / (trained tokens, samples or prompts of the step).

        With `algorithm.aggregate = "constant"` it is 1 / (samples x length). Samples have a trained token, and rejected
        sequences do not count, unless `algorithm.reject.counted` is set.

        Args:
            measured: combined measurements of all micro-batches.
        """
        count = measured[{"token_mean": "tokens", "prompt_mean": "prompts"}.get(self._algorithm.aggregate, "samples")]
        trained = measured.get("trained", count)
        if self._algorithm.aggregate == "constant" and self._algorithm.length is not None:
            trained *= self._algorithm.length
        return 1.0 / trained if trained else 1.0

    def metrics(self, measured: dict[str, float]) -> dict[str, float]:
        """Compute the metrics of the step: means over tokens, quantiles of the ratios, the normalised loss.

        Args:
            measured: combined measurements of all micro-batches.
        """
        loss = {"loss": measured["loss"] * self.gradient_scale(measured)}
        if self._algorithm.kl.target is not None and "kl" in measured:
            loss["kl_coefficient"] = self._coefficients.kl
        if self._algorithm.entropy.target is not None:
            loss["entropy_coefficient"] = self._coefficients.entropy
        ratios = ratio_quantiles(self.log_ratios) if self._algorithm.rows == "sampled" else {}
        return with_replay_shares(other_measurements(measured)) | step_means(measured) | loss | ratios
