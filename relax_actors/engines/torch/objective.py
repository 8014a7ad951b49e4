"""The loss of an optimizer step from log-probs: one place for every engine that trains with torch."""

from __future__ import annotations

import math
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.corrections import kept_sequences, mismatch_metrics, ratio_quantiles, token_weights
from relax_actors.algorithms.losses import kl_estimate, policy_loss, reduce_loss
from relax_actors.config.training import AlgorithmSection
from relax_actors.engines.torch.replay_metrics import shares

PER_TOKEN = ("abs_delta", "k3", "ratio", "ratio_squared", "clipped", "kl", "entropy_proxy", "weight", "bounded")
"""Figures that micro-batches give as sums over tokens and a step reports as means."""


class StepObjective:
    """One step's loss, micro-batch by micro-batch.

    Micro-batches give sums, and the gradients that they add up to are divided once, at the end: by how much is only
    known when the step's last row is there, and after the last sequence may have been rejected. `log_ratios` are those
    of each micro-batch so far, `[tokens] float32`; ranks that share a step join them.

    Args:
        algorithm: the run's.
    """

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._algorithm = algorithm
        self.log_ratios: list[NDArray[Any]] = []

    def loss(
        self,
        logprobs: Tensor,
        rollout: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        actor_fwd: Tensor | None = None,
        reference: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """A micro-batch's sum of the loss, scalar float32, and what it measured, to be joined by `add_metrics`.

        Args:
            logprobs: of the policy that is trained, `[batch, seq] float32`, with gradient.
            rollout: as the tokens were sampled with, `[batch, seq] float32`.
            advantages: `[batch] float32`.
            mask: completion tokens, `[batch, seq] bool`.
            actor_fwd: of the proximal policy, if it is neither the rollout's nor the trainer's.
            reference: of the model that the KL is taken to, if there is one.

        Raises:
            ValueError: shapes do not fit, or `actor_fwd` is wanted and not there.
        """
        algorithm = self._algorithm
        measured = mismatch_metrics(logprobs, rollout, mask)
        self.log_ratios.append((logprobs.detach() - rollout)[mask].cpu().numpy())
        per_token = self._policy(
            logprobs, rollout, self._proximal(logprobs, rollout, actor_fwd), advantages, mask, measured
        )
        if reference is not None:
            kl = kl_estimate(logprobs, reference, algorithm.kl)
            per_token = per_token + algorithm.kl_coefficient * kl
            measured["kl"] = float((kl.detach() * mask).sum())
        trained = self._not_rejected(logprobs, rollout, actor_fwd, mask, measured)
        loss = reduce_loss(per_token, trained, mode=algorithm.loss, normaliser=1.0)
        measured["sequences"] = float(len(mask))
        measured["loss"] = float(loss.detach())
        measured["entropy_proxy"] = float(-(logprobs.detach() * mask).sum())
        return loss, measured

    def _proximal(self, logprobs: Tensor, rollout: Tensor, actor_fwd: Tensor | None) -> Tensor:
        """Log-probs that the clipped ratio is taken against.

        A batch is stepped on once, so the trainer's own before the step are those of this very pass: no second one.
        """
        match self._algorithm.proximal:
            case "rollout":
                return rollout
            case "trainer":
                return logprobs.detach()
            case "actor_fwd":
                if actor_fwd is None:
                    msg = 'algorithm.proximal is "actor_fwd", but the batch has no such log-probs; add the column'
                    raise ValueError(msg)
                return actor_fwd

    def _policy(
        self,
        logprobs: Tensor,
        rollout: Tensor,
        proximal: Tensor,
        advantages: Tensor,
        mask: Tensor,
        measured: dict[str, float],
    ) -> Tensor:
        algorithm = self._algorithm
        policy = policy_loss(
            logprobs,
            proximal,
            advantages,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            clip_ratio_c=algorithm.clip_ratio_c,
        )
        measured["clipped"] = float((policy.clipped & mask).sum())
        if algorithm.correction == "none":
            return policy.loss
        low, high = algorithm.correction_low, algorithm.correction_high
        weights = token_weights(proximal, rollout, kind=algorithm.correction, low=low, high=high)
        measured["weight"] = float((weights.weight * mask).sum())
        measured["bounded"] = float((weights.bounded & mask).sum())
        return policy.loss * weights.weight

    def _not_rejected(
        self, logprobs: Tensor, rollout: Tensor, actor_fwd: Tensor | None, mask: Tensor, measured: dict[str, float]
    ) -> Tensor:
        """The mask without the sequences that are too far from the policy."""
        algorithm = self._algorithm
        if algorithm.reject == "none":
            return mask
        near = actor_fwd if algorithm.proximal == "actor_fwd" and actor_fwd is not None else logprobs
        low, high = algorithm.reject_low, algorithm.reject_high
        kept = kept_sequences(near, rollout, mask, kind=algorithm.reject, low=low, high=high)
        trained = mask & kept.unsqueeze(-1)
        measured["rejected"] = float((~kept).sum())
        measured["trained"] = float(trained.sum() if algorithm.loss == "token" else kept.sum())
        return trained

    def factor(self, measured: dict[str, float]) -> float:
        """What the step's added gradients must be multiplied with, given the joined figures: one over the tokens or
        sequences that were trained. What was rejected counts as if it had never been in the step.
        """
        count = measured["tokens" if self._algorithm.loss == "token" else "sequences"]
        trained = measured.get("trained", count)
        return 1.0 / trained if trained else 1.0

    def figures(self, measured: dict[str, float]) -> dict[str, float]:
        """What the step reports: means over its tokens, quantiles of its ratios, the loss as it was normalised."""
        means = {name: measured[name] / measured["tokens"] for name in PER_TOKEN if name in measured}
        rest = {name: value for name, value in measured.items() if name not in ("trained", "sequences")}
        loss = {"loss": measured["loss"] * self.factor(measured)}
        return shares(rest) | means | loss | ratio_quantiles(self.log_ratios)


def check_norm(norm: float) -> None:
    """Refuse to step on gradients that are not finite.

    Raises:
        FloatingPointError: they are not.
    """
    if not math.isfinite(norm):
        msg = (
            f"gradient norm is {norm}: the loss diverged; start a run of another name with a lower "
            "trainer.learning_rate or a tighter clip"
        )
        raise FloatingPointError(msg)
