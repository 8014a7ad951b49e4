"""Presets of [algorithm]: the settings of the papers' algorithms, by name.

A preset only fills settings that the user did not set. Settings that it does not name keep the defaults of the schema.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings of an algorithm.

    Attributes:
        title: name of the algorithm.
        paper: arXiv number of its source.
        settings: settings of [algorithm], nested as in TOML.
        note: what to know before it is used.
    """

    title: str
    paper: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


CLIP: dict[str, Any] = {"ratio": "token", "surrogate": "clip", "clip_low": 0.2, "clip_high": 0.2}
GROUP: dict[str, Any] = {"advantage": "group", "scale": "group_std"}
SCORE: dict[str, Any] = {"scale": "none", "ratio": "none", "surrogate": "score", "aggregate": "token_mean"}
EXAMPLES: dict[str, Any] = {"rows": "examples", "advantage": "none", "scale": "none", "ratio": "none"}
PAIRS: dict[str, Any] = {
    **EXAMPLES,
    "rows": "pairs",
    "surrogate": "preference",
    "aggregate": "sample_mean_of_sums",
}
TOKENS = {"aggregate": "token_mean"}
SAMPLES = {"aggregate": "sample_mean_of_means"}
KL_IN_REWARD = {"kl": {"place": "reward", "kind": "k1"}}
ON_POLICY = "Each batch is trained once, by the weights that sampled it: `staleness.max = 0`, or a correction."

PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        "GRPO",
        "2402.03300",
        {**GROUP, **CLIP, **SAMPLES},
        'The paper adds a KL: `kl.place = "loss"` with `kl.coefficient = 0.04`.',
    ),
    "dr_grpo": Preset(
        "Dr. GRPO",
        "2503.20783",
        {"advantage": "group", "scale": "none", **CLIP, "aggregate": "constant"},
        "`length` is `rollout.max_tokens` unless set.",
    ),
    "lite_ppo": Preset("Lite PPO", "2508.08221", {"advantage": "group", "scale": "batch_std", **CLIP, **TOKENS}),
    "dapo": Preset(
        "DAPO",
        "2503.14476",
        {
            **GROUP,
            **CLIP,
            "clip_high": 0.28,
            **TOKENS,
            "shaping": {"overlong": True, "filter_zero_variance": True},
        },
        "`shaping.overlong_buffer` is a fifth of `rollout.max_tokens` unless set.",
    ),
    "gspo": Preset(
        "GSPO",
        "2507.18071",
        {**GROUP, "ratio": "sequence_mean", "surrogate": "clip", "clip_low": 3e-4, "clip_high": 4e-4, **SAMPLES},
    ),
    "luspo": Preset(
        "LUSPO",
        "2602.05261",
        {
            **GROUP,
            "ratio": "sequence_mean",
            "surrogate": "clip",
            "clip_low": 2e-3,
            "clip_high": 2.5e-3,
            "aggregate": "sample_weight_length",
        },
    ),
    "cispo": Preset(
        "CISPO",
        "2506.13585",
        {**GROUP, "ratio": "token", "surrogate": "clip_weight", "clip_low": 1.0, "clip_high": 4.0, **TOKENS},
        "A lower bound of `1 - clip_low` = 0 never clips.",
    ),
    "sapo": Preset(
        "SAPO",
        "2511.20347",
        {**GROUP, "ratio": "token", "surrogate": "gate", "tau_pos": 1.0, "tau_neg": 1.05, **SAMPLES},
    ),
    "vespo": Preset(
        "VESPO",
        "2602.10693",
        {
            **GROUP,
            "ratio": "sequence_product",
            "surrogate": "gamma",
            "gamma_pos": (2.0, 3.0),
            "gamma_neg": (3.0, 2.0),
            **TOKENS,
        },
        "The weight is a product over tokens: long samples are damped strongly.",
    ),
    "gmpo": Preset(
        "GMPO",
        "2507.20673",
        {**GROUP, "surrogate": "geometric", "clip_low": 0.4, "clip_high": 0.4, **SAMPLES},
        "Bounds are distances of log-ratios.",
    ),
    "dppo_tv": Preset(
        "DPPO, total variation",
        "2602.04879",
        {
            **GROUP,
            "surrogate": "divergence_mask",
            "divergence": "tv",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "log_ratio_penalty": 1e-3,
            **TOKENS,
        },
        "Bounds are differences of probabilities.",
    ),
    "dppo_kl": Preset(
        "DPPO, KL",
        "2602.04879",
        {
            **GROUP,
            "surrogate": "divergence_mask",
            "divergence": "kl",
            "clip_low": 0.05,
            "clip_high": 0.05,
            **TOKENS,
        },
        "Bounds are those of the binary KL.",
    ),
    "clip_cov": Preset(
        "Clip-Cov",
        "2505.22617",
        {
            **GROUP,
            "surrogate": "clip_cov",
            "clip_low": 1.0,
            "clip_high": 1.0,
            "covariance_share": 2e-4,
            "covariance_bounds": (1.0, 5.0),
            **TOKENS,
        },
    ),
    "kl_cov": Preset(
        "KL-Cov",
        "2505.22617",
        {**GROUP, "surrogate": "kl_cov", "covariance_share": 2e-4, "covariance_coefficient": 0.1, **TOKENS},
    ),
    "p3o": Preset("P3O", "2605.12380", {**GROUP, "surrogate": "p3o", "proximal": "rollout", **TOKENS}),
    "rloo": Preset("RLOO", "2402.14740", {"advantage": "rloo", **SCORE}, ON_POLICY),
    "reinforce_pp": Preset(
        "REINFORCE++",
        "2501.03262",
        {"advantage": "returns", "scale": "none", "whiten": "tokens", **CLIP, **TOKENS, **KL_IN_REWARD},
    ),
    "reinforce_pp_baseline": Preset(
        "REINFORCE++ with baseline",
        "2501.03262",
        {
            "advantage": "group",
            "scale": "none",
            "whiten": "tokens",
            **CLIP,
            **TOKENS,
            "kl": {"place": "loss", "kind": "k2"},
        },
    ),
    "remax": Preset("ReMax", "2310.10505", {"advantage": "greedy", **SCORE}, ON_POLICY),
    "opo": Preset("OPO", "2505.23585", {"advantage": "length_weighted", **SCORE}, ON_POLICY),
    "gpg": Preset("GPG", "2504.02546", {"advantage": "group", **SCORE, "signal_scale": True}, ON_POLICY),
    "gdpo": Preset("GDPO", "2601.05242", {**GROUP, "components": "decoupled", "whiten": "samples", **CLIP, **TOKENS}),
    "passk": Preset("Pass@k training", "2503.19595", {"advantage": "passk", "scale": "none", **CLIP, **TOKENS}),
    "max_rl": Preset("MaxRL", "2602.02710", {"advantage": "mean_ratio", "scale": "none", **CLIP, **TOKENS}),
    "rae": Preset(
        "Role-conditioned advantage (SPIRAL)",
        "2506.24119",
        {"advantage": "ema", "scale": "none", "ema_decay": 0.95, **CLIP, **TOKENS},
    ),
    "optimal_token_baseline": Preset(
        "Optimal token baseline", "2602.07078", {"advantage": "optimal_token", "scale": "none", **CLIP, **TOKENS}
    ),
    "optimal_turn_baseline": Preset(
        "Optimal baseline of turns", "2602.07078", {"advantage": "optimal_turn", "scale": "none", **CLIP, **TOKENS}
    ),
    "ppo": Preset(
        "PPO",
        "1707.06347",
        {
            "advantage": "gae",
            "scale": "none",
            "gamma": 1.0,
            "gae_lambda": 0.95,
            "whiten": "tokens",
            **CLIP,
            **TOKENS,
            **KL_IN_REWARD,
        },
    ),
    "sft": Preset("Supervised fine-tuning", "2203.02155", {**EXAMPLES, "surrogate": "nll", **TOKENS}),
    "dft": Preset("Dynamic fine-tuning", "2508.05629", {**EXAMPLES, "surrogate": "dft", **TOKENS}),
    "dpo": Preset(
        "Direct preference optimisation",
        "2305.18290",
        PAIRS,
        "`pairs.losses` has the losses of its relatives, and mixtures of several.",
    ),
    "simpo": Preset("SimPO", "2405.14734", {**PAIRS, "pairs": {"losses": {"simpo": 1.0}, "beta": 2.0, "gamma": 1.0}}),
    "cpo": Preset("CPO", "2401.08417", {**PAIRS, "pairs": {"losses": {"cpo": 1.0, "sft": 1.0}}}),
    "orpo": Preset("ORPO", "2403.07691", {**PAIRS, "pairs": {"losses": {"odds_ratio": 0.1, "sft": 1.0}}}),
    "kto": Preset(
        "KTO",
        "2402.01306",
        {**PAIRS, "rows": "labelled", "surrogate": "unpaired"},
        "A row has an answer and a field `label`, true or false.",
    ),
    "reward_model": Preset(
        "Reward model of pairs (Bradley-Terry)",
        "2203.02155",
        {**PAIRS, "head": "scores", "surrogate": "bradley_terry"},
        "A field `margin` of a row is the least difference of its scores (arXiv 2307.09288).",
    ),
    "outcome_reward": Preset(
        "Reward model of labelled answers",
        "2110.14168",
        {**EXAMPLES, **TOKENS, "rows": "labelled", "head": "scores", "surrogate": "answer_class"},
        "A row has an answer and a field `label`: true or false, or the number of a class.",
    ),
    "process_reward": Preset(
        "Process reward model",
        "2305.20050",
        {**EXAMPLES, **TOKENS, "rows": "steps", "head": "scores", "surrogate": "step_class", "scores": {"classes": 2}},
        "A row has `steps`, a list of texts, or an answer with separators, and `labels`, one for each step.",
    ),
    "opd": Preset(
        "On-policy distillation",
        "2306.13649",
        {"advantage": "none", "scale": "none", **CLIP, **TOKENS, "distil": {"place": "advantage", "coefficient": 1.0}},
        "The advantage of a token is the log-prob of the teacher minus that of the student.",
    ),
    "self_distill": Preset(
        "Self-distillation with a hint",
        "2601.19897",
        {"advantage": "none", "scale": "none", **CLIP, **TOKENS, "distil": {"place": "advantage", "coefficient": 1.0}},
        "The teacher is the trained model with a hint in its prompt.",
    ),
}
"""Presets by the value of `algorithm.name`."""


def named(name: str) -> Preset:
    """Return a preset.

    Raises:
        ValueError: there is no preset of that name.
    """
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        msg = f"algorithm.name = {name!r} is not a known preset; {hint}known: {', '.join(PRESETS)}"
        raise ValueError(msg)
    return PRESETS[name]


def filled(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of [algorithm] with those that are not set taken from the preset.

    Raises:
        ValueError: there is no preset of that name.
    """
    name = tree.get("name")
    return _merged(named(name).settings, tree) if isinstance(name, str) else dict(tree)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each setting in a tree."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _merged(defaults: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree whose missing settings are taken from defaults, section by section."""
    found = dict(defaults) | dict(tree)
    for name, value in defaults.items():
        if isinstance(value, Mapping) and isinstance(tree.get(name), Mapping) and name != "losses":  # replaced whole
            found[name] = _merged(value, tree[name])
    return found
