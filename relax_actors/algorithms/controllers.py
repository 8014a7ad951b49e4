"""Coefficients that adapt to a measured quantity after each step.

All updates of a step's batch have the same coefficients, as in the papers: a step adapts them once, from its mean over
the updates. The engine keeps the coefficients in its checkpoint and replays the steps after it, so a restarted trainer
continues with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.training import TrainerSection


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Coefficients of one step.

    Attributes:
        kl: factor of the KL penalty.
        entropy: factor of the entropy bonus.
        last_entropy: mean entropy of the previous step in nats; None before the first.
    """

    kl: float
    entropy: float
    last_entropy: float | None = None


def adapted_kl(coefficient: float, measured: float, *, target: float, horizon: float, samples: float) -> float:
    """Adapt the coefficient of the KL penalty towards a target (arXiv 1909.08593, section 2.2).

    `coefficient * (1 + clip(measured / target - 1, -0.2, 0.2) * samples / horizon)`.

    Args:
        coefficient: of this step.
        measured: mean KL of this step, in the unit of `target`.
        target: KL to hold, above 0.
        horizon: samples over which the coefficient adapts.
        samples: samples of this step.

    Raises:
        ValueError: the target or the horizon is not positive.
    """
    if not (target > 0 and horizon > 0):
        msg = f"the target of the KL is {target} and its horizon {horizon}; both must be above 0"
        raise ValueError(msg)
    error = min(max(measured / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * samples / horizon)


def adapted_entropy(coefficient: float, measured: float, *, target: float, delta: float) -> float:
    """Adapt the coefficient of the entropy bonus towards a target (Skywork-OR1, arXiv 2505.22312, section 4).

    `coefficient + delta` while the entropy is at most the target, else `coefficient - delta`, never below 0.

    Args:
        coefficient: of this step.
        measured: mean entropy of this step in nats.
        target: entropy to hold.
        delta: change a step.
    """
    return max(0.0, coefficient + (delta if measured <= target else -delta))


def applied_entropy(coefficients: Coefficients, target: float | None) -> float:
    """Return the factor of the entropy bonus: 0 if the last entropy exceeded its target."""
    if target is None or coefficients.last_entropy is None or coefficients.last_entropy <= target:
        return coefficients.entropy
    return 0.0


def adapted(
    algorithm: AlgorithmSection, coefficients: Coefficients, measured: Mapping[str, float], epochs: int = 1
) -> Coefficients:
    """Return the coefficients of the next step.

    `measured` are sums over the updates of the step: `tokens`, `samples`, and `kl` and `entropy` where they adapt.
    `epochs` is how often the updates trained each sample.
    """
    kl, entropy, last = coefficients.kl, coefficients.entropy, coefficients.last_entropy
    if algorithm.kl.target is not None and "kl" in measured:
        samples = measured["samples"]
        mean, horizon = measured["kl"] / max(samples, 1.0), algorithm.kl.horizon
        kl = adapted_kl(kl, mean, target=algorithm.kl.target, horizon=horizon, samples=samples / epochs)
    if algorithm.entropy.target is not None and "entropy" in measured:
        last = measured["entropy"] / max(measured["tokens"], 1.0)
        entropy = adapted_entropy(entropy, last, target=algorithm.entropy.target, delta=algorithm.entropy.delta)
    return Coefficients(kl, entropy, last)


class StepCoefficients:
    """Coefficients of the current step, and the measurements of its updates so far.

    Attributes:
        current: coefficients of all updates of the current step.
    """

    def __init__(self, algorithm: AlgorithmSection, trainer: TrainerSection) -> None:
        self._algorithm, self._updates, self._epochs = algorithm, trainer.updates, trainer.epochs
        self.restore(Coefficients(algorithm.kl.coefficient, algorithm.entropy.coefficient))

    def restore(self, coefficients: Coefficients) -> None:
        """Continue before the first update of a step with these coefficients."""
        self.current = coefficients
        self._done = 0
        self._sums: dict[str, float] = {}

    def record(self, measured: Mapping[str, float]) -> None:
        """Add the sums of an update; the last update of a step adapts the coefficients."""
        for name in ("tokens", "samples", "kl", "entropy"):
            if name in measured:
                self._sums[name] = self._sums.get(name, 0.0) + measured[name]
        self._done += 1
        if self._done == self._updates:
            self.restore(adapted(self._algorithm, self.current, self._sums, self._epochs))
