r"""Formulas of the values of settings in [algorithm], each as plain text and as LaTeX.

Notation: r, reward of a sample; y, its trained tokens; A, advantage; lp, log-prob of the trained policy; old, ref, log-
probs of the proximal policy and of the reference model; rollout, log-prob that the token was sampled with; R, ratio of
trained to proximal policy; sg, stop gradient; V, value of the critic.
"""

from __future__ import annotations

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
P3O_RATIO = (
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
