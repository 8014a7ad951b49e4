"""Loss of an optimizer step from log-probs, shared by all engines that train with torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.corrections import (
    CorrectionKind,
    RejectKind,
    kept_sequences,
    mismatch_metrics,
    ratio_quantiles,
    token_weights,
)
from relax_actors.algorithms.distillation import distillation_loss, sampled_reverse_kl
from relax_actors.algorithms.losses import LossMode, kl_estimate, policy_loss, reduce_loss
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.engines.torch.replay_metrics import with_replay_shares

LOSS_MODES: dict[str, LossMode] = {
    "token_mean": "token",
    "sample_mean_of_means": "sequence",
    "constant": "constant",
}
"""Mode of `reduce_loss` for each value of algorithm.aggregate."""
PER_TOKEN = (
    "abs_delta",
    "k3",
    "ratio",
    "ratio_squared",
    "clipped",
    "kl",
    "entropy_proxy",
    "weight",
    "bounded",
    "distil",
)
"""Metrics that a micro-batch measures as sums over tokens and a step reports as means."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Trained tokens of the sequences of a micro-batch, padded; `[batch, width]` unless noted.

    Attributes:
        logprobs: float32, log-probs of the trained policy, with gradient.
        rollout: float32, log-probs that the tokens were sampled with.
        advantages: float32.
        mask: bool, true for trained tokens, false for padding.
        sample_tokens: `[batch] int64`, trained tokens of the whole sample of each sequence; None if every sample has
            one sequence.
        actor_fwd: float32, log-probs of the proximal policy; required if algorithm.proximal is "actor_fwd". With
            "trainer" they are given if a batch is used for several updates, and are those before the first.
        reference: float32, log-probs of the reference model of the KL, if there is one.
        teacher: log-probs of a teacher; required with algorithm.distil.place = "loss".
    """

    logprobs: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor
    sample_tokens: Tensor | None = None
    actor_fwd: Tensor | None = None
    reference: Tensor | None = None
    teacher: TeacherInputs | None = None


@dataclass(frozen=True, slots=True)
class TeacherInputs:
    """Log-probs of a teacher for the tokens of a micro-batch; `[batch, width]` and `[batch, width, k]` float32.

    Attributes:
        logprobs: of the tokens themselves.
        top: of its k most likely tokens at each token; None without `algorithm.distil.top_k`.
        student_top: log-probs of the trained policy at the same k tokens, with gradient.
    """

    logprobs: Tensor
    top: Tensor | None = None
    student_top: Tensor | None = None


class StepObjective:
    """Loss of one optimizer step, micro-batch by micro-batch.

    The loss of a micro-batch is a sum. The accumulated gradients are divided once, before the optimizer's step, because
    the divisor is known only after the last row has arrived and its last sequence was kept or rejected.

    Args:
        algorithm: section [algorithm] of the run.

    Attributes:
        log_ratios: `[tokens] float32` of each micro-batch so far; data-parallel ranks gather them.

    Raises:
        ValueError: `algorithm.aggregate` is "constant", and `algorithm.length` is not set.
    """

    def __init__(self, algorithm: AlgorithmSection) -> None:
        if algorithm.aggregate == "constant" and algorithm.length is None:
            msg = 'algorithm.aggregate = "constant" needs algorithm.length; a Config sets it to rollout.max_tokens'
            raise ValueError(msg)
        self._algorithm = algorithm
        self.log_ratios: list[NDArray[Any]] = []

    @property
    def needs_actor_fwd(self) -> bool:
        """Whether `LossInputs.actor_fwd` is required."""
        return self._algorithm.proximal == "actor_fwd"

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
            ValueError: shapes do not match, or `actor_fwd` is missing.
        """
        algorithm, mask = self._algorithm, inputs.mask
        logprobs, rollout = inputs.logprobs, inputs.rollout
        measured = mismatch_metrics(logprobs, rollout, mask)
        self.log_ratios.append((logprobs.detach() - rollout)[mask].cpu().numpy())
        per_token = self._policy(inputs, self._proximal(inputs), measured)
        if inputs.reference is not None:
            kl = kl_estimate(logprobs, inputs.reference, algorithm.kl.kind)
            per_token = per_token + algorithm.kl.coefficient * kl
            measured["kl"] = float((kl.detach() * mask).sum())
        if self.needs_teacher:
            distilled = self._distilled(inputs)
            per_token = per_token + algorithm.distil.coefficient * distilled
            measured["distil"] = float((distilled.detach() * mask).sum())
        counts = mask.sum(-1) if inputs.sample_tokens is None else inputs.sample_tokens
        shares = mask.sum(-1).double() / counts.clamp(min=1)
        measured["samples"] = float(shares.sum())
        trained = self._trained_tokens(inputs, shares, measured)
        mode = LOSS_MODES[algorithm.aggregate]
        loss = reduce_loss(per_token, trained, mode=mode, normaliser=1.0, sample_tokens=inputs.sample_tokens)
        measured["loss"] = float(loss.detach())
        measured["entropy_proxy"] = float(-(logprobs.detach() * mask).sum())
        return loss, measured

    def _proximal(self, inputs: LossInputs) -> Tensor:
        """Return the log-probs that the clipped ratio is taken against.

        Where a batch is used for one update, the trainer's log-probs before it are those of this pass.
        """
        match self._algorithm.proximal:
            case "rollout":
                return inputs.rollout
            case "trainer":
                return inputs.logprobs.detach() if inputs.actor_fwd is None else inputs.actor_fwd
            case "actor_fwd":
                if inputs.actor_fwd is None:
                    msg = 'algorithm.proximal is "actor_fwd", but the batch lacks its log-probs; add the role actor_fwd'
                    raise ValueError(msg)
                return inputs.actor_fwd

    def _policy(self, inputs: LossInputs, proximal: Tensor, measured: dict[str, float]) -> Tensor:
        algorithm, mask = self._algorithm, inputs.mask
        policy = policy_loss(
            inputs.logprobs,
            proximal,
            inputs.advantages,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            clip_ratio_c=algorithm.dual_clip,
        )
        measured["clipped"] = float((policy.clipped & mask).sum())
        if algorithm.correction.kind == "none":
            return policy.loss
        kind, low, high = algorithm.correction.kind, algorithm.correction.low, algorithm.correction.high
        weights = token_weights(proximal, inputs.rollout, kind=cast("CorrectionKind", kind), low=low, high=high)
        measured["weight"] = float((weights.weight * mask).sum())
        measured["bounded"] = float((weights.bounded & mask).sum())
        return policy.loss * weights.weight

    def _trained_tokens(self, inputs: LossInputs, shares: Tensor, measured: dict[str, float]) -> Tensor:
        """Return the mask without rejected sequences, whose ratios are too far from 1."""
        algorithm, mask, near = self._algorithm, inputs.mask, inputs.logprobs
        if algorithm.reject.kind == "none":
            return mask
        if inputs.actor_fwd is not None:
            near = inputs.actor_fwd
        low, high = algorithm.reject.low, algorithm.reject.high
        kind = cast("RejectKind", algorithm.reject.kind)
        kept = kept_sequences(near, inputs.rollout, mask, kind=kind, low=low, high=high)
        trained = mask & kept.unsqueeze(-1)
        measured["rejected"] = float((~kept).sum())
        measured["trained"] = float(trained.sum() if algorithm.aggregate == "token_mean" else (shares * kept).sum())
        return trained

    def gradient_scale(self, measured: dict[str, float]) -> float:
        """Return the factor for the accumulated gradients: 1 / (trained tokens or samples of the step).

        With `algorithm.aggregate = "constant"` it is 1 / (samples x length). Samples have a trained token, and rejected
        sequences do not count.

        Args:
            measured: combined measurements of all micro-batches.
        """
        count = measured["tokens" if self._algorithm.aggregate == "token_mean" else "samples"]
        trained = measured.get("trained", count)
        if self._algorithm.aggregate == "constant" and self._algorithm.length is not None:
            trained *= self._algorithm.length
        return 1.0 / trained if trained else 1.0

    def metrics(self, measured: dict[str, float]) -> dict[str, float]:
        """Compute the metrics of the step: means over tokens, quantiles of the ratios, the normalised loss.

        Args:
            measured: combined measurements of all micro-batches.
        """
        means = {name: measured[name] / measured["tokens"] for name in PER_TOKEN if name in measured}
        rest = {name: value for name, value in measured.items() if name not in ("trained", "samples")}
        loss = {"loss": measured["loss"] * self.gradient_scale(measured)}
        return with_replay_shares(rest) | means | loss | ratio_quantiles(self.log_ratios)


def check_gradient_norm(norm: float, section: str = "trainer") -> None:
    """Raise FloatingPointError unless a gradient norm is finite.

    Args:
        norm: norm of the gradients of the whole model.
        section: "trainer" or "critic", whose learning rate is too high.
    """
    if not math.isfinite(norm):
        msg = (
            f"gradient norm is {norm}: the loss diverged; start a new run with a lower {section}.learning_rate or "
            "tighter clip bounds"
        )
        raise FloatingPointError(msg)
