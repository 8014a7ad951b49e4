"""Policy losses that damp large ratios smoothly: SAPO, VESPO and GMPO."""

from __future__ import annotations

import math

from relax_actors.algorithms.losses import MAX_LOG_RATIO
from relax_actors.algorithms.policy import PolicyInputs, PolicyLoss
from relax_actors.algorithms.specs import LossSpec

MIN_LOG_WEIGHT = math.log(1e-8)


@LossSpec(
    ratio="setting",
    formula="-(4 / tau) sigmoid(tau (R - 1)) A, with tau_pos where A > 0, else tau_neg",
    latex=r"-\frac{4}{\tau} \sigma(\tau (\rho - 1)) A, \quad \tau = \tau_{\text{pos}} \text{ if } A > 0 "
    r"\text{ else } \tau_{\text{neg}}",
)
def gate(inputs: PolicyInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> PolicyLoss:
    """Compute the loss of SAPO: a sigmoid gate in place of the clip (arXiv 2511.20347).

    `-(4 / tau) sigmoid(tau (r - 1)) A` with tau = `tau_pos` where A > 0, else `tau_neg`. At r = 1 the gradient is
    PPO's.

    Args:
        inputs: tokens of the micro-batch.
        tau_pos: temperature for positive advantages, above 0.
        tau_neg: temperature for other advantages, above 0.

    Raises:
        ValueError: a temperature is not positive.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        msg = f"tau_pos is {tau_pos} and tau_neg is {tau_neg}; both must be above 0, such as 1.0 and 1.05"
        raise ValueError(msg)
    ratio, advantages = inputs.ratio, inputs.advantages
    positive, negative = ratio.new_full((), tau_pos), ratio.new_full((), tau_neg)
    tau = positive.where(advantages > 0, negative)
    loss = -(4 / tau) * (tau * (ratio - 1)).sigmoid() * advantages
    return PolicyLoss(loss, inputs.no_token, ratio.detach())


@LossSpec(
    ratio="sequence_product",
    over_sample="sum",
    formula="-sg(exp(l) R^k exp(-l R)) A lp, with (k, l) = gamma_pos where A >= 0, else gamma_neg",
    latex=r"-\operatorname{sg}(e^{\lambda} \rho^{k} e^{-\lambda \rho}) A \ell_t",
)
def gamma(
    inputs: PolicyInputs, *, gamma_pos: tuple[float, float] = (2.0, 3.0), gamma_neg: tuple[float, float] = (3.0, 2.0)
) -> PolicyLoss:
    """Compute the loss of VESPO: a gamma weighting of the ratio of the whole sample (arXiv 2602.10693).

    `-phi(w) A logprob` with `phi(w) = sg(exp(lambda) w^k exp(-lambda w))`, so that phi(1) = 1. w is the product of the
    ratios of the sample's tokens (each log-ratio clamped to +-20) and of the weights of the off-policy correction,
    within 1e-8 and e^20.

    Args:
        inputs: tokens of the micro-batch; `log_ratio` is not read.
        gamma_pos: k and lambda where A >= 0.
        gamma_neg: k and lambda where A < 0.
    """
    delta = (inputs.logprobs - inputs.proximal).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    correction = inputs.weights.log().clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)
    log_weight = inputs.sample_sum("log_weight", delta + correction).clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)
    log_weight = log_weight.expand_as(delta)
    (k_pos, lambda_pos), (k_neg, lambda_neg) = gamma_pos, gamma_neg
    positive = lambda_pos + k_pos * log_weight - lambda_pos * log_weight.exp()
    negative = lambda_neg + k_neg * log_weight - lambda_neg * log_weight.exp()
    phi = positive.where(inputs.advantages >= 0, negative).exp()
    loss = -phi * inputs.advantages * inputs.logprobs
    return PolicyLoss(loss, inputs.no_token, log_weight.exp(), weighted=True)


@LossSpec(
    over_sample="mean",
    formula="-A exp(mean over the sample of c_t), c_t = lp - old, at most clip_high if A > 0, at least -clip_low "
    "if A < 0",
    latex=r"-A \exp\left(\frac{1}{|y|} \sum_t c_t\right), \quad c_t = \begin{cases} "
    r"\min(\ell_t - \ell^{\text{old}}_t, \epsilon_{\text{high}}) & A > 0 \\ "
    r"\max(\ell_t - \ell^{\text{old}}_t, -\epsilon_{\text{low}}) & A < 0 \end{cases}",
)
def geometric(inputs: PolicyInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> PolicyLoss:
    """Compute the loss of GMPO: the geometric mean of the clipped ratios of a sample (arXiv 2507.20673).

    `-A exp(mean_t(c_t))` with c_t = log-ratio of the token, clipped in log space to at most `clip_high` where A > 0,
    and to at least `-clip_low` where A < 0. A correction contributes the geometric mean of its weights. A sample
    without tokens contributes 0. The mean is over the selected tokens, where the step selects some
    (`algorithm.entropy.quantile`), as in TRL.

    Args:
        inputs: tokens of the micro-batch; `log_ratio` is not read.
        clip_low: lower bound of the log-ratio, as its distance from 0.
        clip_high: upper bound of the log-ratio.

    Raises:
        ValueError: a bound is negative.
    """
    if clip_low < 0 or clip_high < 0:
        msg = f"clip_low is {clip_low} and clip_high is {clip_high}; both are distances of a log-ratio from 0"
        raise ValueError(msg)
    advantages, delta = inputs.advantages, inputs.logprobs - inputs.proximal
    high, low = (advantages > 0) & (delta > clip_high), (advantages < 0) & (delta < -clip_low)
    bounded = delta.masked_fill(low, -clip_low).masked_fill(high, clip_high)
    correction = inputs.weights.log().clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)
    trained = inputs.sample_tokens.clamp(min=1).unsqueeze(-1).to(delta.dtype)
    terms, count = bounded.detach() + correction, trained
    if inputs.selected is not None:
        terms = terms.masked_fill(~inputs.selected, 0.0)
        count = inputs.sample_sum("selected", inputs.selected.to(delta.dtype)).clamp(min=1)
    mean = inputs.sample_sum("bounded", terms) / count
    ratio = (mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + bounded - bounded.detach()).exp()
    # The engine takes the mean over the trained tokens of a sample, of which only the selected ones have a loss.
    return PolicyLoss(-advantages * ratio * (trained / count), high | low, ratio.detach(), weighted=True)
