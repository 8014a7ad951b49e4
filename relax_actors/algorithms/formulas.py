r"""Formulas of the settings in [algorithm], as plain text and as LaTeX, and what an algorithm needs.

Notation: r, reward of a sample; y, its trained tokens; A, advantage; lp, log-prob of the trained policy; old, ref, log-
probs of the proximal policy and of the reference model; R, ratio of trained to proximal policy; sg, stop gradient.

Imports neither torch nor the functions themselves, so that `relax algorithms` starts at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    "all_turns": ("G_k - mean(G of all turns of the group)", r"G_{i,k} - \bar{G}, \quad t \in \text{turn } k"),
    "ema": ("r - b, then b <- decay b + (1 - decay) r", r"r_i - b, \quad b \leftarrow \eta b + (1 - \eta) r_i"),
    "reward": ("r", r"r_i"),
    "none": ("0", r"0"),
    "returns": ("G_t = r_t + gamma G_(t+1)", r"G_t = r_t + \gamma G_{t+1}"),
    "gae": (
        "d_t + gamma lambda A_(t+1), with d_t = r_t + gamma V_(t+1) - V_t",
        r"\delta_t + \gamma \lambda A_{t+1}, \quad \delta_t = r_t + \gamma V_{t+1} - V_t",
    ),
    "optimal_token": (
        "G_t - sum(G_t W_t) / sum(W_t), with W_t = sum over s <= t of (1 - 2 p_s + sum_v p_s(v)^2)",
        (
            r"G_{i,t} - \frac{\sum_j G_{j,t} W_{j,t}}{\sum_j W_{j,t}}, "
            r"\quad W_{i,t} = \sum_{s \leq t} \left(1 - 2 \pi_s + \sum_v \pi_s(v)^2\right)"
        ),
    ),
    "optimal_turn": (
        "G_t - sum(G_k W_k) / sum(W_k) of the token's turn k, with W_k of its last token",
        r"G_{i,t} - \frac{\sum_j G_{j,k} W_{j,k}}{\sum_j W_{j,k}}, \quad t \in \text{turn } k",
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
        "-sg(R) A lp, 0 for a token whose divergence from the proximal policy is beyond its bound and would grow",
        r"-\operatorname{sg}(\rho) A \ell_t \, \mathbb{1}[D_t \leq \epsilon]",
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
        "as clip, and 0 for a share of the tokens, drawn among those with (A - mean A)(lp - mean lp) within bounds",
        (
            r"\text{PPO clip}, \quad 0 \text{ for tokens drawn from } "
            r"\{t : (A_t - \bar{A})(\ell_t - \bar{\ell}) \in (c_1, c_2)\}"
        ),
    ),
    "kl_cov": (
        "-R A, plus coefficient |lp - old| for the share of tokens with the largest (A - mean A)(lp - mean lp)",
        r"-\rho A + \beta\, |\ell_t - \ell^{\text{old}}_t|\, \mathbb{1}[t \in \text{top covariance}]",
    ),
}
"""Policy loss of a token."""
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
    yield _advantage(algorithm)
    if algorithm.signal_scale:
        plain, latex = (
            "A x samples of the step / samples in groups with unequal rewards",
            r"A \cdot \frac{B}{B_{\text{signal}}}",
        )
        yield Formula("scaled", plain, latex)
    if algorithm.distil.place == "advantage":
        plain = "A + coefficient (lp(teacher) - lp(student))"
        yield Formula("distillation", plain, r"A_t + c\,(\ell^{\text{teacher}}_t - \ell^{\text{student}}_t)")
    if algorithm.whiten != "none":
        over = f"over all {algorithm.whiten} of the step"
        latex = rf"\frac{{A - \bar{{A}}}}{{\operatorname{{std}}(A)}} \quad \text{{{over}}}"
        yield Formula("whitened", f"(A - mean(A)) / std(A), {over}", latex)
    if algorithm.ratio in RATIOS and algorithm.surrogate not in ("score", "geometric"):
        yield Formula("ratio", *RATIOS[algorithm.ratio])
    yield Formula(
        "loss", *SURROGATES.get(algorithm.surrogate, (algorithm.surrogate, rf"\text{{{algorithm.surrogate}}}"))
    )
    if algorithm.log_ratio_penalty:
        latex = r"+ \lambda\,(\ell_t - \ell^{\text{old}}_t)^2"
        yield Formula("penalty", "+ log_ratio_penalty (lp - old)^2", latex)
    yield Formula("aggregate", *AGGREGATES[algorithm.aggregate])
    if algorithm.kl.place != "none":
        plain, latex = KL[algorithm.kl.kind]
        sign, where = ("-", "reward of each token") if algorithm.kl.place == "reward" else ("+", "loss of each token")
        rest = r"\quad x = \ell_t - \ell^{\text{ref}}_t"
        text = f"{sign} coefficient ({plain}) in the {where}, with x = lp - ref"
        yield Formula("KL", text, rf"{sign} \beta\, ({latex}) \text{{ in the {where}}}, {rest}")


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
