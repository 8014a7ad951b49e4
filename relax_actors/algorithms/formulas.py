"""Formulas of an algorithm as plain text and LaTeX, and what it needs.

Notation: r, reward of a sample; y, its trained tokens; A, advantage; lp, log-prob of the trained policy; old, ref, log-
probs of the proximal policy and of the reference model; rollout, log-prob that the token was sampled with; R, ratio of
trained to proximal policy; sg, stop gradient; V, value of the critic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from relax_actors.algorithms.advantages.baselines import SCALES
from relax_actors.algorithms.advantages.components import decoupled
from relax_actors.algorithms.kl import KL
from relax_actors.algorithms.losses import AGGREGATES
from relax_actors.algorithms.named_functions import readers, spec_of_advantage, spec_of_loss
from relax_actors.algorithms.policy import RATIOS, ROLLOUT_RATIO
from relax_actors.algorithms.specs import advantage_spec
from relax_actors.algorithms.surrogates.preference import FORMULAS
from relax_actors.algorithms.surrogates.weighted import DIVERGENCES
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.registry.catalog import POLICY_LOSSES


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


_NEEDS = {"values": "critic", "greedy": "greedy rollout", "squares": "squared probabilities"}


def needs(algorithm: AlgorithmSection) -> list[str]:
    """List what an algorithm needs beyond rewards: a reference, a critic and so on."""
    advantage = spec_of_advantage(algorithm)
    inputs = [
        ("reference", algorithm.needs_reference),
        *((name, need in advantage.needs) for need, name in _NEEDS.items()),
        ("state across steps", advantage.running_mean),
        ("teacher", algorithm.distil.place != "none"),
        ("reward components", algorithm.components == "decoupled"),
        ("on-policy data", _is_score(algorithm)),
        (f"{algorithm.rows} in the data", algorithm.rows != "sampled"),
    ]
    return [name for name, is_needed in inputs if is_needed]


def _is_score(algorithm: AlgorithmSection) -> bool:
    """Whether the loss of sampled rows has neither a ratio nor a correction."""
    spec = spec_of_loss(algorithm)
    no_ratio = algorithm.rows == "sampled" and spec.ratio == "none" and not spec.over_row
    return no_ratio and algorithm.correction.kind == "none"


def formulas(algorithm: AlgorithmSection) -> Iterator[Formula]:
    """Yield an algorithm's formulas, part by part; users' functions by dotted path."""
    yield from _rewards(algorithm)
    if algorithm.rows == "sampled":
        yield from _advantages(algorithm)
    yield from _losses(algorithm)


def constants(algorithm: AlgorithmSection) -> dict[str, Any]:
    """Return the values of settings in an algorithm's formulas, by name."""
    text = " ".join(formula.plain for formula in formulas(algorithm))
    words = set(re.findall(r"[a-z_]+", text))
    values = {name: getattr(algorithm, name) for name in AlgorithmSection.model_fields if name in words}
    if "overlong_factor" in words:
        values["shaping.overlong_factor"] = algorithm.shaping.overlong_factor
    if algorithm.kl.place != "none":
        values["kl.coefficient"] = algorithm.kl.coefficient
    if algorithm.distil.place != "none":
        values["distil.coefficient"] = algorithm.distil.coefficient
    return {name: value for name, value in values.items() if isinstance(value, int | float | tuple)}


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
    if "values" in spec_of_advantage(algorithm).needs and algorithm.components != "decoupled":
        yield Formula(
            "critic",
            "loss 1/2 max((V - G)^2, (V_old + clip(V - V_old, -value_clip, value_clip) - G)^2), G = A + V_old before "
            "whitening",
            (
                r"\frac{1}{2} \max\left((V_t - G_t)^2, (V^{\text{old}}_t + \operatorname{clip}(V_t - "
                r"V^{\text{old}}_t, -c, c) - G_t)^2\right), \quad G_t = A_t + V^{\text{old}}_t"
            ),
        )
    if algorithm.critic_lambda is not None:
        plain = "the critic learns G with gae_lambda = critic_lambda in A"
        yield Formula("targets", plain, r"\lambda_{\text{critic}} \text{ in } A \text{ of } G_t")
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
    spec = spec_of_loss(algorithm)
    yield Formula("loss", spec.formula or name, spec.latex or rf"\text{{{name}}}")
    for loss, weight in algorithm.pairs.losses.items() if name in readers(POLICY_LOSSES, "pairs") else ():
        plain, latex, source = FORMULAS[loss]
        yield Formula(loss, f"{weight:g} x {plain} (arXiv {source})", rf"{weight:g} \cdot {latex}")
    if name in readers(POLICY_LOSSES, "divergence"):
        plain, latex = DIVERGENCES[algorithm.divergence]
        yield Formula("dropped", f"tokens with {plain}", latex)
    if algorithm.log_ratio_penalty:
        latex = r"+ \lambda\,(\ell_t - \ell^{\text{old}}_t)^2"
        yield Formula("penalty", "+ log_ratio_penalty (lp - old)^2", latex)
    if algorithm.positive_nll:
        latex = r"- \frac{\mu}{\sum_{i \text{ correct}} |y_i|} \sum_{i \text{ correct}} \sum_t \ell_t"
        yield Formula("imitation", "+ positive_nll x mean of -lp over the tokens of correct samples", latex)
    if algorithm.observation_nll:
        latex = r"- \frac{\lambda}{|O|} \sum_{t \in O} \ell_t, \quad O \text{: tokens of observations}"
        yield Formula("observations", "+ observation_nll x mean of -lp over the tokens of observations", latex)
    yield Formula("aggregate", *AGGREGATES[algorithm.aggregate])
    if algorithm.kl.place == "loss":
        plain, latex = KL[algorithm.kl.kind]
        rest = r"\quad x = \ell_t - \ell^{\text{ref}}_t"
        text = f"+ coefficient ({plain}) in the loss of each token, with x = lp - ref"
        yield Formula("KL", text, rf"+ \beta\, ({latex}) \text{{ in the loss of each token}}, {rest}")


def _ratio(algorithm: AlgorithmSection) -> tuple[str, str] | None:
    """Return the formula of R in the policy loss; None if the loss has no R."""
    spec = spec_of_loss(algorithm)
    if spec.ratio == "rollout":
        return ROLLOUT_RATIO
    is_set = spec.ratio == "setting" or algorithm.surrogate not in POLICY_LOSSES.built_in
    return RATIOS.get(algorithm.ratio if is_set else spec.ratio)


def _advantage(algorithm: AlgorithmSection) -> Formula:
    if algorithm.components == "decoupled":
        spec = advantage_spec(decoupled)
        return Formula("advantage", f"A = {spec.formula}", f"A_i = {spec.latex}")
    spec, scale, name = spec_of_advantage(algorithm), SCALES.get(algorithm.scale), algorithm.advantage
    plain, latex = spec.formula, spec.latex
    if not plain:
        return Formula("advantage", f"A = {name}", rf"A = \text{{{name}}}")
    if algorithm.gae_alpha is not None and "gae_lambda" in plain:
        plain += ", gae_lambda = max(0, 1 - 1 / (gae_alpha |y|))"
        latex += r", \quad \lambda = \max\left(0, 1 - \frac{1}{\alpha |y_i|}\right)"
    symbol = "A_t" if "t}" in latex or "_t" in latex or r"\quad t" in latex else "A_i"
    if scale is not None:
        plain, latex = f"({plain}) / ({scale[0]})", rf"\frac{{{latex}}}{{{scale[1]}}}"
    return Formula("advantage", f"A = {plain}", rf"{symbol} = {latex}")
