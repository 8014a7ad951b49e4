"""Presets of [algorithm]: the settings of the papers' algorithms, by name."""

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
        settings: settings of [algorithm], nested as in TOML; those that are not here keep the defaults of the schema.
    """

    title: str
    paper: str
    settings: Mapping[str, Any] = field(default_factory=dict)


SCORE: dict[str, Any] = {"ratio": "none", "surrogate": "score", "scale": "none", "aggregate": "token_mean"}
MEAN_OF_MEANS = {"aggregate": "sample_mean_of_means"}
KL_REWARD = {"kl": {"place": "reward", "kind": "k1"}}

PRESETS: dict[str, Preset] = {
    "grpo": Preset("GRPO", "2402.03300"),
    "dr_grpo": Preset("Dr. GRPO", "2503.20783", {"scale": "none", "aggregate": "constant"}),
    "lite_ppo": Preset("Lite PPO", "2508.08221", {"scale": "batch_std"}),
    "dapo": Preset(
        "DAPO", "2503.14476", {"clip_high": 0.28, "shaping": {"overlong": True, "filter_zero_variance": True}}
    ),
    "gspo": Preset(
        "GSPO", "2507.18071", {"ratio": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4, **MEAN_OF_MEANS}
    ),
    "luspo": Preset(
        "LUSPO",
        "2602.05261",
        {"ratio": "sequence_mean", "clip_low": 2e-3, "clip_high": 2.5e-3, "aggregate": "sample_weight_length"},
    ),
    "cispo": Preset("CISPO", "2506.13585", {"surrogate": "clip_weight", "clip_low": 1.0, "clip_high": 4.0}),
    "sapo": Preset("SAPO", "2511.20347", {"surrogate": "gate", **MEAN_OF_MEANS}),
    "vespo": Preset("VESPO", "2602.10693", {"surrogate": "gamma", "ratio": "sequence_product"}),
    "gmpo": Preset(
        "GMPO", "2507.20673", {"surrogate": "geometric", "clip_low": 0.4, "clip_high": 0.4, **MEAN_OF_MEANS}
    ),
    "dppo_tv": Preset(
        "DPPO with total variation", "2602.04879", {"surrogate": "divergence_mask", "log_ratio_penalty": 1e-3}
    ),
    "dppo_kl": Preset(
        "DPPO with KL",
        "2602.04879",
        {"surrogate": "divergence_mask", "divergence": "kl", "clip_low": 0.05, "clip_high": 0.05},
    ),
    "clip_cov": Preset("Clip-Cov", "2505.22617", {"surrogate": "clip_cov"}),
    "kl_cov": Preset("KL-Cov", "2505.22617", {"surrogate": "kl_cov"}),
    "p3o": Preset("P3O", "2605.12380", {"surrogate": "p3o"}),
    "rloo": Preset("RLOO", "2402.14740", {"advantage": "rloo", **SCORE}),
    "reinforce_pp": Preset(
        "REINFORCE++", "2501.03262", {"advantage": "returns", "scale": "none", "whiten": "tokens", **KL_REWARD}
    ),
    "reinforce_pp_baseline": Preset(
        "REINFORCE++ with baseline",
        "2501.03262",
        {"scale": "none", "whiten": "tokens", "kl": {"place": "loss", "kind": "k2"}},
    ),
    "remax": Preset("ReMax", "2310.10505", {"advantage": "greedy", **SCORE}),
    "opo": Preset("OPO", "2505.23585", {"advantage": "length_weighted", **SCORE}),
    "gpg": Preset("GPG", "2504.02546", {**SCORE, "signal_scale": True}),
    "gdpo": Preset("GDPO", "2601.05242", {"components": "decoupled", "whiten": "samples"}),
    "passk": Preset("Pass@k training", "2503.19595", {"advantage": "passk", "scale": "none"}),
    "max_rl": Preset("MaxRL", "2602.02710", {"advantage": "mean_ratio", "scale": "none"}),
    "rae": Preset("Role-conditioned advantage (SPIRAL)", "2506.24119", {"advantage": "ema", "scale": "none"}),
    "optimal_token_baseline": Preset(
        "Optimal token baseline", "2602.07078", {"advantage": "token_baseline", "scale": "none"}
    ),
    "optimal_token_baseline_turns": Preset(
        "Optimal token baseline by turn", "2602.07078", {"advantage": "token_baseline_turns", "scale": "none"}
    ),
    "ppo": Preset(
        "PPO",
        "1707.06347",
        {"advantage": "gae", "scale": "none", "gae_lambda": 0.95, "whiten": "tokens", **KL_REWARD},
    ),
    "opd": Preset(
        "On-policy distillation",
        "2306.13649",
        {"advantage": "none", "scale": "none", "distil": {"place": "advantage"}},
    ),
    "self_distill": Preset(
        "Self-distillation with a hint",
        "2601.19897",
        {"advantage": "none", "scale": "none", "distil": {"place": "advantage"}},
    ),
}
"""Presets by the value of `algorithm.name`."""


def filled(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of [algorithm] with those that are not set taken from the preset.

    Raises:
        ValueError: there is no preset of that name.
    """
    name = tree.get("name", "grpo")
    if not isinstance(name, str):
        return dict(tree)
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        msg = f"algorithm.name = {name!r} is not a known preset; {hint}known: {', '.join(PRESETS)}"
        raise ValueError(msg)
    return _merged(PRESETS[name].settings, tree)


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
        if isinstance(value, Mapping) and isinstance(tree.get(name), Mapping):
            found[name] = _merged(value, tree[name])
    return found
