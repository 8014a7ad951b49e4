"""Policy losses that restrain the tokens with the largest covariance of advantage and log-prob (arXiv 2505.22617).

The covariance of a token is `(A - mean A)(logprob - mean logprob)`, with means over all trained tokens of the step.
Which tokens are chosen is decided once a step, over all of its tokens and ranks; `PolicyInputs.selected` holds the
choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from relax_actors.algorithms.policy import PolicyInputs, PolicyLoss
from relax_actors.algorithms.specs import LossSpec
from relax_actors.algorithms.surrogates.clipped import check_clip, clip

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[np.floating]
Choice = NDArray[np.bool_]


def choose_clip_cov(
    advantages: Array,
    logprobs: Array,
    ratio: Array,
    *,
    clip_low: float,
    clip_high: float,
    covariance_share: float,
    covariance_bounds: tuple[float, float],
    seed: int,
) -> Choice:
    """Choose the tokens of Clip-Cov: at random among those whose covariance is within the bounds.

    Tokens that the clip of the ratio already stops are not candidates. `max(1, share * tokens)` tokens are chosen, or
    all candidates if these are fewer. The choice follows from the seed and the order of the tokens alone.

    Args:
        advantages: `[tokens]` of the whole step.
        logprobs: `[tokens]`, before the step.
        ratio: `[tokens]`.
        clip_low: lower clip distance.
        clip_high: upper clip distance.
        covariance_share: share of the tokens to choose.
        covariance_bounds: exclusive bounds of the covariance.
        seed: from the run's seed and the step.

    Returns:
        `[tokens]`, true for chosen tokens.

    Raises:
        ValueError: a clip bound is out of range.
    """
    check_clip(clip_low, clip_high)
    covariance = _covariance(advantages, logprobs)
    stopped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    low, high = covariance_bounds
    candidates = np.flatnonzero((covariance > low) & (covariance < high) & ~stopped)
    count = max(1, int(covariance_share * len(covariance)))
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(candidates))
    chosen = np.zeros(len(covariance), np.bool_)
    chosen[candidates[order[:count]]] = True
    return chosen


def choose_kl_cov(advantages: Array, logprobs: Array, *, covariance_share: float) -> Choice:
    """Choose the tokens of KL-Cov: the `max(1, share * tokens)` with the largest covariance, earlier ones in a tie.

    Args:
        advantages: `[tokens]` of the whole step.
        logprobs: `[tokens]`, before the step.
        covariance_share: share of the tokens to choose.

    Returns:
        `[tokens]`, true for chosen tokens.
    """
    covariance = _covariance(advantages, logprobs)
    count = max(1, int(covariance_share * len(covariance)))
    chosen = np.zeros(len(covariance), np.bool_)
    chosen[np.argsort(-covariance, kind="stable")[:count]] = True
    return chosen


@LossSpec(
    ratio="setting",
    clips_ratio=True,
    choose=choose_clip_cov,
    formula="-min(R A, clip(R, 1 - clip_low, 1 + clip_high) A), 0 for covariance_share of the tokens, drawn among "
    "those with (A - mean A)(lp - mean lp) within covariance_bounds",
    latex=r"\text{PPO clip}, \quad 0 \text{ for tokens drawn from } "
    r"\{t : (A_t - \bar{A})(\ell_t - \bar{\ell}) \in (c_1, c_2)\}",
)
def clip_cov(inputs: PolicyInputs, *, clip_low: float = 1.0, clip_high: float = 1.0) -> PolicyLoss:
    """Compute the loss of Clip-Cov: PPO's clip, and 0 for the chosen tokens (arXiv 2505.22617, section 4).

    Args:
        inputs: tokens of the micro-batch; `selected` holds the choice of `choose_clip_cov`.
        clip_low: lower clip distance, in [0, 1].
        clip_high: upper clip distance, at least 0.

    Raises:
        ValueError: a bound is out of range, or `selected` is missing.
    """
    clipped, selected = clip(inputs, clip_low=clip_low, clip_high=clip_high), _selected(inputs)
    return PolicyLoss(clipped.loss.masked_fill(selected, 0.0), clipped.clipped | selected, clipped.ratio)


@LossSpec(
    ratio="setting",
    choose=choose_kl_cov,
    formula="-R A, plus covariance_coefficient |lp - old| for covariance_share of the tokens, with the largest (A - "
    "mean A)(lp - mean lp)",
    latex=r"-\rho A + \beta\, |\ell_t - \ell^{\text{old}}_t|\, \mathbb{1}[t \in \text{top covariance}]",
)
def kl_cov(inputs: PolicyInputs, *, covariance_coefficient: float = 0.1) -> PolicyLoss:
    """Compute the loss of KL-Cov: no clip, and a penalty of the chosen tokens (arXiv 2505.22617, section 4).

    `-A r`, plus `covariance_coefficient * |logprob - proximal|` for the chosen tokens. `clipped` marks these.

    Args:
        inputs: tokens of the micro-batch; `selected` holds the choice of `choose_kl_cov`.
        covariance_coefficient: factor of the penalty.

    Raises:
        ValueError: `selected` is missing.
    """
    selected = _selected(inputs)
    penalty = covariance_coefficient * (inputs.logprobs - inputs.proximal).abs()
    loss = -inputs.advantages * inputs.ratio + penalty.where(selected, penalty.new_zeros(()))
    return PolicyLoss(loss, selected, inputs.ratio.detach())


def _covariance(advantages: Array, logprobs: Array) -> NDArray[np.float64]:
    advantage, logprob = advantages.astype(np.float64), logprobs.astype(np.float64)
    if not len(advantage):
        return advantage
    product: NDArray[np.float64] = (advantage - advantage.mean()) * (logprob - logprob.mean())
    return product


def _selected(inputs: PolicyInputs) -> Tensor:
    if inputs.selected is None:
        msg = "the tokens that the covariance selects are missing; choose them over the whole step first"
        raise ValueError(msg)
    return inputs.selected
