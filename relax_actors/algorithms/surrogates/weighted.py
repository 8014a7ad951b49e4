"""Policy losses whose ratio is a weight without gradient: the plain score, DPPO and P3O."""

from __future__ import annotations

from typing import Literal, assert_never

from relax_actors.algorithms.kl import kl_estimate
from relax_actors.algorithms.losses import MAX_LOG_RATIO
from relax_actors.algorithms.policy import PolicyInputs, PolicyLoss
from relax_actors.algorithms.specs import LossSpec

_TINY = 1e-8
DIVERGENCES = {
    "tv": (
        "A > 0 and p - q > clip_high, or A <= 0 and p - q < -clip_low, with p = exp(lp), q = exp(old)",
        (
            r"A > 0 \text{ and } p - q > \epsilon_{\text{high}}, \text{ or } A \leq 0 \text{ and } "
            r"p - q < -\epsilon_{\text{low}}, \quad p = e^{\ell_t}, q = e^{\ell^{\text{old}}_t}"
        ),
    ),
    "kl": (
        (
            "A > 0, p > q and D > clip_high, or A <= 0, p < q and D > clip_low, with p = exp(lp), q = exp(old) and D = "
            "q log(q / p) + (1 - q) log((1 - q) / (1 - p))"
        ),
        (
            r"A > 0, p > q, D > \epsilon_{\text{high}}, \text{ or } A \leq 0, p < q, D > \epsilon_{\text{low}}, "
            r"\quad D = q \log \frac{q}{p} + (1 - q) \log \frac{1 - q}{1 - p}, "
            r"\quad p = e^{\ell_t}, q = e^{\ell^{\text{old}}_t}"
        ),
    ),
}
"""Formulas of the tokens that `divergence_mask` drops."""


@LossSpec(ratio="none", formula="-A lp", latex=r"-A \ell_t")
def score(inputs: PolicyInputs) -> PolicyLoss:
    """Compute the plain policy gradient: `-A logprob` (REINFORCE; RLOO, arXiv 2402.14740; GPG, arXiv 2504.02546).

    There is no ratio, so data of older weights need a correction.
    """
    loss = -inputs.advantages * inputs.logprobs
    return PolicyLoss(loss, inputs.no_token, loss.new_ones(loss.shape))


@LossSpec(
    ratio="setting",
    formula="-sg(min(R, ratio_cap)) A lp, 0 for a dropped token",
    latex=r"-\operatorname{sg}(\min(\rho, c)) A \ell_t \, \mathbb{1}[t \text{ is kept}]",
)
def divergence_mask(
    inputs: PolicyInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    divergence: Literal["tv", "kl"] = "tv",
    ratio_cap: float | None = None,
) -> PolicyLoss:
    """Compute the loss of DPPO: drop tokens whose probability has moved too far (arXiv 2602.04879).

    `-A sg(min(r, ratio_cap)) logprob`, with p and q the probabilities of the trained and the proximal policy. A token
    is dropped (loss 0, still counted) if the update would push p further away from q, and

    - "tv": `p - q > clip_high` where A > 0, `p - q < -clip_low` otherwise;
    - "kl": the binary KL `q log(q / p) + (1 - q) log((1 - q) / (1 - p))` is above `clip_high` where A > 0 and p > q,
      above `clip_low` where A <= 0 and p < q.

    Args:
        inputs: tokens of the micro-batch.
        clip_low: bound where the advantage is not positive.
        clip_high: bound where the advantage is positive.
        divergence: "tv" or "kl".
        ratio_cap: largest weight; None for no bound.
    """
    logprobs, proximal = inputs.logprobs.detach(), inputs.proximal
    p, q, ratio = logprobs.exp(), proximal.exp(), inputs.ratio.detach()
    match divergence:
        case "tv":
            high, low = p - q > clip_high, p - q < -clip_low
        case "kl":
            tail = (1 - q) * ((1 - q + _TINY) / (1 - p + _TINY)).log()
            distance = q * (proximal - logprobs) + tail
            high, low = (distance > clip_high) & (p > q), (distance > clip_low) & (p < q)
        case _:
            assert_never(divergence)
    dropped = high.where(inputs.advantages > 0, low)
    weight = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    loss = (-inputs.advantages * weight * inputs.logprobs).masked_fill(dropped, 0.0)
    return PolicyLoss(loss, dropped, ratio)


@LossSpec(
    ratio="rollout",
    whole_step=True,
    formula="-sg(min(R, e)) A lp + (1 - e) k3(policy || rollout), with e = sum(R)^2 / (N sum(R^2)) over the step",
    latex=r"-\operatorname{sg}(\min(\rho, e)) A \ell_t + (1 - e)\, k_3, \quad e = \frac{(\sum \rho)^2}{N \sum \rho^2}",
)
def p3o(inputs: PolicyInputs) -> PolicyLoss:
    """Compute the loss of P3O: the step's effective sample size caps weights and sets a KL term (arXiv 2605.12380).

    `-sg(min(r, e)) A logprob + (1 - e) k3(policy || rollout)` with r the ratio to the rollout and
    `e = (sum r)^2 / (N sum r^2)` over the N trained tokens of the step. On-policy e is 1. The weights of a
    correction apply to the first term.
    """
    ratio = (inputs.logprobs - inputs.rollout).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    precise = ratio.double()
    tokens = inputs.step_sum("tokens", precise.new_ones(precise.shape))
    total, squares = inputs.step_sum("ratio", precise), inputs.step_sum("ratio_squared", precise.square())
    share = (total.square() / (tokens * squares)).to(ratio.dtype)
    policy = -ratio.minimum(share) * inputs.advantages * inputs.logprobs * inputs.weights
    kl = kl_estimate(inputs.logprobs, inputs.rollout, "k3")
    return PolicyLoss(policy + (1 - share) * kl, ratio > share, ratio, weighted=True)
