"""Loss of an optimizer step from log-probs, shared by every engine that trains with torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.corrections import kept_sequences, mismatch_metrics, ratio_quantiles, token_weights
from relax_actors.algorithms.losses import kl_estimate, policy_loss, reduce_loss
from relax_actors.config.training import AlgorithmSection
from relax_actors.engines.torch.replay_metrics import shares

PER_TOKEN = ("abs_delta", "k3", "ratio", "ratio_squared", "clipped", "kl", "entropy_proxy", "weight", "bounded")
"""Metrics that micro-batches give as sums over tokens and a step reports as means."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """A micro-batch as the loss sees it: trained tokens of each sequence, padded; all `[batch, width]` unless noted.

    Attributes:
        logprobs: float32, of the policy that is trained, with gradient.
        rollout: float32, as the tokens were sampled with.
        advantages: float32.
        mask: bool, true where a trained token lies.
        sample_tokens: `[batch] int64`, trained tokens of the whole sample that each sequence belongs to; None where
            every sample has one sequence.
        actor_fwd: float32, of the proximal policy, where algorithm.proximal is "actor_fwd".
        reference: float32, of the model that the KL is taken to, if there is one.
    """

    logprobs: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor
    sample_tokens: Tensor | None = None
    actor_fwd: Tensor | None = None
    reference: Tensor | None = None


class StepObjective:
    """Loss of one optimizer step, micro-batch by micro-batch.

    Micro-batches give sums, and their added gradients are divided once, at the end: the divisor is known only when the
    step's last row has come and its last sequence was kept or rejected.

    Args:
        algorithm: settings of the run.

    Attributes:
        log_ratios: those of each micro-batch so far, `[tokens] float32`; ranks that share a step join them.
    """

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._algorithm = algorithm
        self.log_ratios: list[NDArray[Any]] = []

    @property
    def needs_actor_fwd(self) -> bool:
        """Whether `LossInputs.actor_fwd` is read."""
        return self._algorithm.proximal == "actor_fwd"

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, float]]:
        """Return a micro-batch's sum of the loss, scalar float32, and its measurements, to be joined by `add_metrics`.

        Raises:
            ValueError: shapes do not fit, or `actor_fwd` is missing.
        """
        algorithm, mask = self._algorithm, inputs.mask
        logprobs, rollout = inputs.logprobs, inputs.rollout
        measured = mismatch_metrics(logprobs, rollout, mask)
        self.log_ratios.append((logprobs.detach() - rollout)[mask].cpu().numpy())
        per_token = self._policy(inputs, self._proximal(inputs), measured)
        if inputs.reference is not None:
            kl = kl_estimate(logprobs, inputs.reference, algorithm.kl)
            per_token = per_token + algorithm.kl_coefficient * kl
            measured["kl"] = float((kl.detach() * mask).sum())
        counts = mask.sum(-1) if inputs.sample_tokens is None else inputs.sample_tokens
        shares = mask.sum(-1).double() / counts.clamp(min=1)
        measured["samples"] = float(shares.sum())
        trained = self._not_rejected(inputs, shares, measured)
        loss = reduce_loss(per_token, trained, mode=algorithm.loss, normaliser=1.0, sample_tokens=inputs.sample_tokens)
        measured["loss"] = float(loss.detach())
        measured["entropy_proxy"] = float(-(logprobs.detach() * mask).sum())
        return loss, measured

    def _proximal(self, inputs: LossInputs) -> Tensor:
        """Log-probs that the clipped ratio is taken against.

        Each batch takes one optimizer step, so the trainer's own log-probs before the step are those of this pass.
        """
        match self._algorithm.proximal:
            case "rollout":
                return inputs.rollout
            case "trainer":
                return inputs.logprobs.detach()
            case "actor_fwd":
                if inputs.actor_fwd is None:
                    msg = 'algorithm.proximal is "actor_fwd", but the batch has no such log-probs; add the column'
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
            clip_ratio_c=algorithm.clip_ratio_c,
        )
        measured["clipped"] = float((policy.clipped & mask).sum())
        if algorithm.correction == "none":
            return policy.loss
        low, high = algorithm.correction_low, algorithm.correction_high
        weights = token_weights(proximal, inputs.rollout, kind=algorithm.correction, low=low, high=high)
        measured["weight"] = float((weights.weight * mask).sum())
        measured["bounded"] = float((weights.bounded & mask).sum())
        return policy.loss * weights.weight

    def _not_rejected(self, inputs: LossInputs, shares: Tensor, measured: dict[str, float]) -> Tensor:
        """Return the mask without the sequences that are too far from the policy."""
        algorithm, mask, near = self._algorithm, inputs.mask, inputs.logprobs
        if algorithm.reject == "none":
            return mask
        if self.needs_actor_fwd and inputs.actor_fwd is not None:
            near = inputs.actor_fwd
        low, high = algorithm.reject_low, algorithm.reject_high
        kept = kept_sequences(near, inputs.rollout, mask, kind=algorithm.reject, low=low, high=high)
        trained = mask & kept.unsqueeze(-1)
        measured["rejected"] = float((~kept).sum())
        measured["trained"] = float(trained.sum() if algorithm.loss == "token" else (shares * kept).sum())
        return trained

    def factor(self, measured: dict[str, float]) -> float:
        """Return the factor of the step's added gradients: one over the trained tokens or samples.

        Rejected sequences count as if they had never been in the step.

        Args:
            measured: joined measurements of all micro-batches.
        """
        count = measured["tokens" if self._algorithm.loss == "token" else "samples"]
        trained = measured.get("trained", count)
        return 1.0 / trained if trained else 1.0

    def figures(self, measured: dict[str, float]) -> dict[str, float]:
        """Return the step's metrics: means over its tokens, quantiles of its ratios, the normalised loss."""
        means = {name: measured[name] / measured["tokens"] for name in PER_TOKEN if name in measured}
        rest = {name: value for name, value in measured.items() if name not in ("trained", "samples")}
        loss = {"loss": measured["loss"] * self.factor(measured)}
        return shares(rest) | means | loss | ratio_quantiles(self.log_ratios)


def check_norm(norm: float) -> None:
    """Raise FloatingPointError unless a gradient norm is finite."""
    if not math.isfinite(norm):
        msg = (
            f"gradient norm is {norm}: the loss diverged; start a run of another name with a lower "
            "trainer.learning_rate or a tighter clip"
        )
        raise FloatingPointError(msg)
