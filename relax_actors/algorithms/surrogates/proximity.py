"""Policy losses that keep the policy near the one that sampled without clipping single ratios: M2PO and DRO."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from relax_actors.algorithms.losses import MAX_LOG_RATIO
from relax_actors.algorithms.policy import PolicyInputs, PolicyLoss
from relax_actors.algorithms.specs import LossSpec

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[np.floating]


def choose_second_moment(advantages: Array, ratio: Array, *, second_moment_budget: float) -> NDArray[np.bool_]:
    """Choose the tokens that M2PO drops: those with the largest squared log-ratios, as few as the budget needs.

    Candidates are the tokens that the update moves further away: A > 0 and R > 1, or A < 0 and R < 1. The candidates
    with the largest (log R)^2 are dropped until the mean over the others is at most the budget; earlier ones in a tie.

    Args:
        advantages: `[tokens]` of the whole step.
        ratio: `[tokens]`, above 0.
        second_moment_budget: largest mean of (log R)^2 over the candidates that are kept.

    Returns:
        `[tokens]`, true for dropped tokens.
    """
    log_ratio = np.clip(np.log(ratio.astype(np.float64)), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    candidates = np.flatnonzero(advantages * log_ratio > 0)
    order = candidates[np.argsort(-np.square(log_ratio[candidates]), kind="stable")]
    ascending = np.square(log_ratio[order])[::-1]
    means = np.cumsum(ascending) / np.arange(1, len(order) + 1)
    kept = int(np.count_nonzero(means <= second_moment_budget))  # the means of ascending numbers ascend
    dropped = np.zeros(len(advantages), np.bool_)
    dropped[order[: len(order) - kept]] = True
    return dropped


@LossSpec(
    ratio="setting",
    choose=choose_second_moment,
    formula="-R A, 0 for the tokens with A log R > 0 and the largest (log R)^2 of the step, until the mean of the "
    "others is at most second_moment_budget",
    latex=r"-\rho A \, M_t, \quad M_t = 0 \text{ for the largest } (\log \rho)^2 \text{ with } A \log \rho > 0 "
    r"\text{ until } \overline{(\log \rho)^2} \leq \tau",
)
def second_moment(inputs: PolicyInputs) -> PolicyLoss:
    """Compute the loss of M2PO: no clip, and 0 for tokens beyond a budget of the second moment (arXiv 2510.01161).

    `-A r M` with the mask M of `choose_second_moment` over the whole step; dropped tokens still count. The authors'
    code has two further bounds in place of the mask: it caps the log-ratios of the candidates at the number with which
    their second moment meets the budget, and never clips ratios in [0.7, 1.5]. AReaL takes all tokens as candidates.

    Args:
        inputs: tokens of the micro-batch; `selected` holds the dropped ones.

    Raises:
        ValueError: `selected` is missing.
    """
    if inputs.selected is None:
        msg = "the tokens beyond the budget of the second moment are missing; choose them over the whole step first"
        raise ValueError(msg)
    loss = (-inputs.advantages * inputs.ratio).masked_fill(inputs.selected, 0.0)
    return PolicyLoss(loss, inputs.selected, inputs.ratio.detach())


@LossSpec(
    formula="-(A lp - dro_beta / 2 (lp - old)^2)",
    latex=r"-\left(A \ell_t - \frac{\beta}{2} (\ell_t - \ell^{\text{old}}_t)^2\right)",
)
def dro(inputs: PolicyInputs, *, dro_beta: float = 0.05) -> PolicyLoss:
    """Compute the loss of DRO: the plain score, and a squared log-ratio that holds the policy back (arXiv 2405.19107).

    `-(A logprob - beta / 2 (logprob - proximal)^2)` at each token, the form of Tinker and verl for language models. The
    paper learns a value for A; here it is the estimator's. The log-ratio is clamped to +-`MAX_LOG_RATIO`.

    Args:
        inputs: tokens of the micro-batch.
        dro_beta: beta, above 0.

    Raises:
        ValueError: beta is not positive.
    """
    if not dro_beta > 0:
        msg = f"dro_beta is {dro_beta}; it must be above 0, such as 0.05"
        raise ValueError(msg)
    delta = (inputs.logprobs - inputs.proximal).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    loss: Tensor = -inputs.advantages * inputs.logprobs + dro_beta / 2 * delta.square()
    return PolicyLoss(loss, inputs.no_token, delta.detach().exp())
