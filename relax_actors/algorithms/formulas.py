r"""Formulas of the settings in [algorithm], as plain text and as LaTeX, and what an algorithm needs.

Notation: r, reward of a sample; y, its trained tokens; A, advantage; lp, log-prob of the trained policy; old, ref, log-
probs of the proximal policy and of the reference model; R, ratio of trained to proximal policy; sg, stop gradient;
V, value of the critic.

Imports neither torch nor the functions themselves, so that `relax algorithms` starts at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from relax_actors.config.algorithm import AlgorithmSection


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula.

    Attributes:
        part: part of the algorithm that it is of, as "advantage".
        plain: as plain text.
        latex: as LaTeX.
    """

    part: str
    plain: str
    latex: str


ADVANTAGES = {
    "group": ("r - mean(r)", r"r_i - \bar{r}"),
    "rloo": ("r - mean(r of the other samples)", r"r_i - \frac{1}{n-1} \sum_{j \neq i} r_j"),
    "greedy": ("r - r(greedy sample)", r"r_i - r_{\text{greedy}}"),
    "length_weighted": ("r - sum(|y| r) / sum(|y|)", r"r_i - \frac{\sum_j |y_j| r_j}{\sum_j |y_j|}"),
    "passk": (
        "r(best) - r(second best) for the best sample, else 0",
        r"(r_{(1)} - r_{(2)}) \, \mathbb{1}[i = \arg\max_j r_j]",
    ),
    "mean_ratio": ("(r - mean(r)) / mean(r)", r"\frac{r_i - \bar{r}}{\bar{r}}"),
    "turn": ("G_k - mean(G_k of the group)", r"G_{i,k} - \bar{G}_k, \quad t \in \text{turn } k"),
    "ema": ("r - b, then b <- ema_decay b + (1 - ema_decay) r", r"r_i - b, \quad b \leftarrow \eta b + (1 - \eta) r_i"),
    "reward": ("r", r"r_i"),
    "none": ("0", r"0"),
    "returns": ("G_t = r_t + gamma G_(t+1)", r"G_t = r_t + \gamma G_{t+1}"),
    "gae": (
        "d_t + gamma gae_lambda A_(t+1), with d_t = r_t + gamma V_(t+1) - V_t",
        r"\delta_t + \gamma \lambda A_{t+1}, \quad \delta_t = r_t + \gamma V_{t+1} - V_t",
    ),
    "optimal_token": (
        (
            "G_t - sum(G_t W_t) / sum(W_t) over samples with a token at t, W_t = sum over s <= t of (1 - 2 p_s + sum_v "
            "p_s(v)^2)"
        ),
        (
            r"G_{i,t} - \frac{\sum_j G_{j,t} W_{j,t}}{\sum_j W_{j,t}}, "
            r"\quad W_{i,t} = \sum_{s \leq t} \left(1 - 2 \pi_s + \sum_v \pi_s(v)^2\right)"
        ),
    ),
    "optimal_turn": (
        (
            "G_k - sum(G_k W_k) / sum(W_k) over samples with k trained tokens or more, at the k-th trained token, W_k "
            "= sum over trained tokens up to it of (1 - 2 p_s + sum_v p_s(v)^2)"
        ),
        (
            r"G_{i,k} - \frac{\sum_j G_{j,k} W_{j,k}}{\sum_j W_{j,k}}, \quad W_{i,k} = \sum_{s \leq k} "
            r"\left(1 - 2 \pi_s + \sum_v \pi_s(v)^2\right), \quad t \text{ the } k\text{-th trained token}"
        ),
    ),
}
"""Advantage of a sample, or of a token where the formula has an index t."""
SCALES = {
    "group_std": ("std(r) + epsilon", r"\operatorname{std}(r) + \epsilon"),
    "batch_std": ("std(r of the step) + epsilon", r"\operatorname{std}_{\text{step}}(r) + \epsilon"),
    "group_mean": ("mean(r)", r"\bar{r}"),
}
"""Divisors of an advantage."""
RATIOS = {
    "token": ("R = exp(lp - old), of each token", r"\rho_t = \exp(\ell_t - \ell^{\text{old}}_t)"),
    "sequence_mean": (
        "R = exp(mean over the sample of (lp - old))",
        r"\rho = \exp\left(\frac{1}{|y|} \sum_t (\ell_t - \ell^{\text{old}}_t)\right)",
    ),
    "sequence_product": (
        "R = exp(sum over the sample of (lp - old))",
        r"\rho = \exp\left(\sum_t (\ell_t - \ell^{\text{old}}_t)\right)",
    ),
}
"""Importance ratios."""
_P3O_RATIO = (
    "R = exp(lp - rollout), of each token",
    r"\rho_t = \exp(\ell_t - \ell^{\text{rollout}}_t)",
)
SURROGATES = {
    "clip": (
        "-min(R A, clip(R, 1 - clip_low, 1 + clip_high) A)",
        r"-\min\left(\rho A, \operatorname{clip}(\rho, 1 - \epsilon_{\text{low}}, 1 + \epsilon_{\text{high}}) A\right)",
    ),
    "clip_weight": (
        "-sg(clip(R, 1 - clip_low, 1 + clip_high)) A lp",
        (
            r"-\operatorname{sg}(c) A \ell_t, \quad c = "
            r"\operatorname{clip}(\rho, 1 - \epsilon_{\text{low}}, 1 + \epsilon_{\text{high}})"
        ),
    ),
    "gate": (
        "-(4 / tau) sigmoid(tau (R - 1)) A, with tau_pos where A > 0, else tau_neg",
        (
            r"-\frac{4}{\tau} \sigma(\tau (\rho - 1)) A, \quad \tau = \tau_{\text{pos}} \text{ if } A > 0 "
            r"\text{ else } \tau_{\text{neg}}"
        ),
    ),
    "gamma": (
        "-sg(exp(l) R^k exp(-l R)) A lp, with (k, l) = gamma_pos where A >= 0, else gamma_neg",
        r"-\operatorname{sg}(e^{\lambda} \rho^{k} e^{-\lambda \rho}) A \ell_t",
    ),
    "geometric": (
        "-A exp(mean over the sample of c_t), c_t = lp - old, at most clip_high if A > 0, at least -clip_low if A < 0",
        (
            r"-A \exp\left(\frac{1}{|y|} \sum_t c_t\right), \quad c_t = \begin{cases} "
            r"\min(\ell_t - \ell^{\text{old}}_t, \epsilon_{\text{high}}) & A > 0 \\ "
            r"\max(\ell_t - \ell^{\text{old}}_t, -\epsilon_{\text{low}}) & A < 0 \end{cases}"
        ),
    ),
    "divergence_mask": (
        "-sg(min(R, ratio_cap)) A lp, 0 for a dropped token",
        r"-\operatorname{sg}(\min(\rho, c)) A \ell_t \, \mathbb{1}[t \text{ is kept}]",
    ),
    "score": ("-A lp", r"-A \ell_t"),
    "p3o": (
        "-sg(min(R, e)) A lp + (1 - e) k3(policy || rollout), with e = sum(R)^2 / (N sum(R^2)) over the step",
        (
            r"-\operatorname{sg}(\min(\rho, e)) A \ell_t + (1 - e)\, k_3, "
            r"\quad e = \frac{(\sum \rho)^2}{N \sum \rho^2}"
        ),
    ),
    "clip_cov": (
        (
            "-min(R A, clip(R, 1 - clip_low, 1 + clip_high) A), 0 for covariance_share of the tokens, drawn among "
            "those with (A - mean A)(lp - mean lp) within covariance_bounds"
        ),
        (
            r"\text{PPO clip}, \quad 0 \text{ for tokens drawn from } "
            r"\{t : (A_t - \bar{A})(\ell_t - \bar{\ell}) \in (c_1, c_2)\}"
        ),
    ),
    "kl_cov": (
        (
            "-R A, plus covariance_coefficient |lp - old| for covariance_share of the tokens, with the largest (A - "
            "mean A)(lp - mean lp)"
        ),
        r"-\rho A + \beta\, |\ell_t - \ell^{\text{old}}_t|\, \mathbb{1}[t \in \text{top covariance}]",
    ),
}
"""Policy loss of a token."""
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
"""Tokens that `divergence_mask` drops."""
AGGREGATES = {
    "token_mean": (
        "sum over all tokens of the step / number of tokens",
        r"\frac{1}{\sum_i |y_i|} \sum_i \sum_t L_{i,t}",
    ),
    "sample_mean_of_means": (
        "mean over samples of the mean over their tokens",
        r"\frac{1}{N} \sum_i \frac{1}{|y_i|} \sum_t L_{i,t}",
    ),
    "sample_mean_of_sums": ("mean over samples of the sum over their tokens", r"\frac{1}{N} \sum_i \sum_t L_{i,t}"),
    "constant": ("sum over all tokens / (samples of the step x length)", r"\frac{1}{N\,T} \sum_i \sum_t L_{i,t}"),
    "sample_weight_length": (
        "mean over samples of |y| x the sample's loss",
        r"\frac{1}{N} \sum_i |y_i| \cdot \frac{1}{|y_i|} \sum_t L_{i,t}",
    ),
}
"""Loss of a step from the losses L of its tokens."""
KL = {
    "k1": ("x", "x"),
    "k2": ("x^2 / 2", r"\frac{x^2}{2}"),
    "k3": ("exp(-x) - 1 + x", r"e^{-x} - 1 + x"),
}
"""Estimators of the KL, with x = lp - ref."""
_NEEDS = {
    "gae": "critic",
    "greedy": "greedy rollout",
    "optimal_token": "squared probabilities",
    "optimal_turn": "squared probabilities",
    "ema": "state across steps",
}


def needs(algorithm: AlgorithmSection) -> list[str]:
    """List what an algorithm needs beyond rewards: a reference, a critic, a teacher, reward components and so on."""
    found = [
        ("reference", algorithm.kl.place != "none"),
        (_NEEDS.get(algorithm.advantage, ""), algorithm.advantage in _NEEDS),
        ("teacher", algorithm.distil.place != "none"),
        ("reward components", algorithm.components == "decoupled"),
        ("on-policy data", algorithm.surrogate == "score" and algorithm.correction.kind == "none"),
    ]
    return [name for name, is_needed in found if is_needed]


def formulas(algorithm: AlgorithmSection) -> Iterator[Formula]:
    """Yield the formulas of an algorithm, part by part; a function of the user is named by its dotted path."""
    yield from _rewards(algorithm)
    yield from _advantages(algorithm)
    yield from _losses(algorithm)


def constants(algorithm: AlgorithmSection) -> dict[str, Any]:
    """Return the settings that the formulas of an algorithm name, by name, without those that are unset."""
    text = " ".join(formula.plain for formula in formulas(algorithm))
    words = set(re.findall(r"[a-z_]+", text))
    found = {name: getattr(algorithm, name) for name in AlgorithmSection.model_fields if name in words}
    if algorithm.kl.place != "none":
        found["kl.coefficient"] = algorithm.kl.coefficient
    if algorithm.distil.place != "none":
        found["distil.coefficient"] = algorithm.distil.coefficient
    return {name: value for name, value in found.items() if isinstance(value, int | float | tuple)}


def _rewards(algorithm: AlgorithmSection) -> Iterator[Formula]:
    """Yield what changes the rewards and rows before the advantages."""
    if algorithm.shaping.overlong:
        yield Formula(
            "shaped",
            "r + min(0, (max_tokens - overlong_buffer - |y|) / overlong_buffer x overlong_factor)",
            r"r_i + \min\left(0, \frac{L - B - |y_i|}{B} f\right)",
        )
    if algorithm.shaping.filter_zero_variance:
        yield Formula("filter", "rows with std(r) = 0 are refilled", r"\operatorname{std}(r) > 0")
    if algorithm.kl.place == "reward":
        plain, latex = KL[algorithm.kl.kind]
        yield Formula(
            "KL",
            f"- coefficient ({plain}) in the reward of each token, with x = rollout - ref",
            (
                rf"- \beta\, ({latex}) \text{{ in the reward of each token}}, "
                r"\quad x = \ell^{\text{rollout}}_t - \ell^{\text{ref}}_t"
            ),
        )


def _advantages(algorithm: AlgorithmSection) -> Iterator[Formula]:
    distil, is_plain = algorithm.distil.place == "advantage", algorithm.advantage != "none"
    if is_plain or algorithm.components == "decoupled" or not distil:
        yield _advantage(algorithm)
    if algorithm.advantage == "gae" and algorithm.components != "decoupled":
        yield Formula(
            "critic",
            "loss 1/2 max((V - G)^2, (V_old + clip(V - V_old, -value_clip, value_clip) - G)^2), G = A + V_old before "
            "whitening",
            (
                r"\frac{1}{2} \max\left((V_t - G_t)^2, (V^{\text{old}}_t + \operatorname{clip}(V_t - "
                r"V^{\text{old}}_t, -c, c) - G_t)^2\right), \quad G_t = A_t + V^{\text{old}}_t"
            ),
        )
    if algorithm.signal_scale:
        plain, latex = (
            "A x samples of the step / samples in groups with unequal rewards",
            r"A \cdot \frac{B}{B_{\text{signal}}}",
        )
        yield Formula("scaled", plain, latex)
    if algorithm.whiten != "none":
        over = f"over all {algorithm.whiten} of the step"
        latex = rf"\frac{{A - \bar{{A}}}}{{\operatorname{{std}}(A)}} \quad \text{{{over}}}"
        yield Formula("whitened", f"(A - mean(A)) / std(A), {over}", latex)
    if distil:
        base, latex_base = ("A + ", "A_t + ") if is_plain else ("A = ", "A_t = ")
        plain = f"{base}coefficient (teacher - rollout), log-probs of the token"
        latex = rf"{latex_base}c\,(\ell^{{\text{{teacher}}}}_t - \ell^{{\text{{rollout}}}}_t)"
        if algorithm.name == "self_distill":
            hint = "the teacher is the policy with a hint"
            plain, latex = f"{plain}; {hint}", rf"{latex} \quad \text{{{hint}}}"
        yield Formula("distillation" if is_plain else "advantage", plain, latex)


def _losses(algorithm: AlgorithmSection) -> Iterator[Formula]:
    name = algorithm.surrogate
    if ratio := _ratio(algorithm):
        yield Formula("ratio", *ratio)
    yield Formula("loss", *SURROGATES.get(name, (name, rf"\text{{{name}}}")))
    if name == "divergence_mask":
        plain, latex = DIVERGENCES[algorithm.divergence]
        yield Formula("dropped", f"tokens with {plain}", latex)
    if algorithm.log_ratio_penalty:
        latex = r"+ \lambda\,(\ell_t - \ell^{\text{old}}_t)^2"
        yield Formula("penalty", "+ log_ratio_penalty (lp - old)^2", latex)
    yield Formula("aggregate", *AGGREGATES[algorithm.aggregate])
    if algorithm.kl.place == "loss":
        plain, latex = KL[algorithm.kl.kind]
        rest = r"\quad x = \ell_t - \ell^{\text{ref}}_t"
        text = f"+ coefficient ({plain}) in the loss of each token, with x = lp - ref"
        yield Formula("KL", text, rf"+ \beta\, ({latex}) \text{{ in the loss of each token}}, {rest}")


def _ratio(algorithm: AlgorithmSection) -> tuple[str, str] | None:
    """Return the formula of R in the policy loss; None if the loss has no R."""
    match algorithm.surrogate:
        case "score" | "geometric":
            return None
        case "gamma":
            return RATIOS["sequence_product"]
        case "p3o":
            return _P3O_RATIO
        case _:
            return RATIOS.get(algorithm.ratio)


def _advantage(algorithm: AlgorithmSection) -> Formula:
    name = algorithm.advantage
    if algorithm.components == "decoupled":
        plain = "A = sum over components k of w_k (r_k - mean(r_k)) / (std(r_k) + epsilon)"
        latex = r"A_i = \sum_k w_k \frac{r_{k,i} - \bar{r}_k}{\operatorname{std}(r_k) + \epsilon}"
        return Formula("advantage", plain, latex)
    if name not in ADVANTAGES:
        return Formula("advantage", f"A = {name}", rf"A = \text{{{name}}}")
    (plain, latex), scale = ADVANTAGES[name], SCALES.get(algorithm.scale)
    symbol = "A_t" if "t}" in latex or "_t" in latex else "A_i"
    if scale is not None:
        plain, latex = f"({plain}) / ({scale[0]})", rf"\frac{{{latex}}}{{{scale[1]}}}"
    return Formula("advantage", f"A = {plain}", rf"{symbol} = {latex}")
