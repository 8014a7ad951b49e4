"""Settings of [algorithm] that the user wrote, and settings that have no effect beside the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.presets import filled, leaves
from relax_actors.registry.registry import is_dotted

ADVANTAGE_SETTINGS: dict[str, tuple[str, ...]] = {
    "group": ("scale", "epsilon"),
    "rloo": ("scale", "epsilon"),
    "length_weighted": ("scale", "epsilon"),
    "passk": ("scale", "epsilon"),
    "turn": ("scale", "epsilon"),
    "all_turns": ("scale", "epsilon"),
    "ema": ("ema_decay",),
    "returns": ("gamma",),
    "gae": ("gamma", "gae_lambda"),
    "optimal_token": ("gamma",),
    "optimal_turn": ("gamma",),
}
"""Settings that each advantage estimator reads; the others read none."""
LOSS_SETTINGS: dict[str, tuple[str, ...]] = {
    "clip": ("ratio", "clip_low", "clip_high", "dual_clip"),
    "clip_weight": ("ratio", "clip_low", "clip_high"),
    "gate": ("ratio", "tau_pos", "tau_neg"),
    "gamma": ("gamma_pos", "gamma_neg"),
    "geometric": ("clip_low", "clip_high"),
    "divergence_mask": ("ratio", "divergence", "clip_low", "clip_high", "ratio_cap"),
    "clip_cov": ("ratio", "clip_low", "clip_high", "covariance_share", "covariance_bounds"),
    "kl_cov": ("ratio", "covariance_share", "covariance_coefficient"),
}
"""Settings that each policy loss reads; the others read none."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Why a setting has no effect.

    Attributes:
        cause: setting that makes it idle, as `algorithm.kl.place = "none"`.
        remedy: what to set so that it has an effect.
    """

    cause: str
    remedy: str


def written(algorithm: AlgorithmSection) -> dict[str, Any]:
    """Return settings other than the defaults and those of the preset, by dotted name."""
    found = dict(leaves(algorithm.model_dump(exclude={"name"})))
    defaults = dict(leaves(AlgorithmSection().model_dump()))
    preset = dict(leaves(filled({"name": algorithm.name})))
    return {
        key: value for key, value in found.items() if value != defaults.get(key) and value != preset.get(key, defaults)
    }


def idle(algorithm: AlgorithmSection) -> dict[str, Idle]:
    """Return the settings that have no effect, by dotted name."""
    names = [name for name, _ in leaves(algorithm.model_dump())]
    return {name: reason for name in names if (reason := _reason(algorithm, name)) is not None}


def _reason(algorithm: AlgorithmSection, name: str) -> Idle | None:
    for settings, is_met, cause, needed in _conditions(algorithm):
        if not is_met and (name in settings or name.partition(".")[0] in settings):
            return Idle(cause, f"set {needed}")
    return _function_reason(algorithm, name)


def _conditions(algorithm: AlgorithmSection) -> list[tuple[tuple[str, ...], bool, str, str]]:
    """Return settings or tables with the condition that they need: whether it is met, what is set, what to set."""
    kl, correction, reject, distil = algorithm.kl, algorithm.correction, algorithm.reject, algorithm.distil
    custom = is_dotted(correction.kind)
    corrected = f'algorithm.correction.kind = "{correction.kind}"'
    options = tuple(f"distil.{name}" for name in type(distil).model_fields if name != "place")
    kl_options = tuple(f"kl.{name}" for name in type(kl).model_fields if name != "place")
    return [
        (
            ("length",),
            algorithm.aggregate == "constant",
            f'algorithm.aggregate = "{algorithm.aggregate}"',
            'algorithm.aggregate = "constant"',
        ),
        (
            ("weights",),
            algorithm.components == "decoupled",
            'algorithm.components = "sum"',
            'algorithm.components = "decoupled"',
        ),
        (kl_options, kl.place != "none", 'algorithm.kl.place = "none"', 'algorithm.kl.place to "loss" or "reward"'),
        (
            ("kl.k2_gradient", "kl.unbiased"),
            kl.place != "reward",
            'algorithm.kl.place = "reward"',
            'algorithm.kl.place = "loss"',
        ),
        (("kl.horizon",), kl.target is not None, "algorithm.kl.target unset", "algorithm.kl.target"),
        (
            ("entropy.delta",),
            algorithm.entropy.target is not None,
            "algorithm.entropy.target unset",
            "algorithm.entropy.target",
        ),
        (
            ("correction.level", "correction.normalise"),
            correction.kind != "none",
            corrected,
            'algorithm.correction.kind, e.g. to "tis"',
        ),
        (
            ("correction.high",),
            custom or correction.kind in ("tis", "icepop"),
            corrected,
            'algorithm.correction.kind to "tis" or "icepop"',
        ),
        (
            ("correction.low",),
            custom or correction.kind == "icepop",
            corrected,
            'algorithm.correction.kind = "icepop"',
        ),
        (
            ("reject.low", "reject.high"),
            reject.kind != "none",
            'algorithm.reject.kind = "none"',
            'algorithm.reject.kind, e.g. to "geometric"',
        ),
        (
            options,
            distil.place != "none",
            'algorithm.distil.place = "none"',
            'algorithm.distil.place to "advantage" or "loss"',
        ),
        (
            ("shaping.overlong_buffer", "shaping.overlong_factor"),
            algorithm.shaping.overlong,
            "algorithm.shaping.overlong = false",
            "algorithm.shaping.overlong = true",
        ),
    ]


def _function_reason(algorithm: AlgorithmSection, name: str) -> Idle | None:
    """Why a setting of advantages or policy losses is idle: the chosen function does not read it."""
    for setting, chosen, table in (
        ("advantage", algorithm.advantage, ADVANTAGE_SETTINGS),
        ("surrogate", algorithm.surrogate, LOSS_SETTINGS),
    ):
        readers = [function for function, settings in table.items() if name in settings]
        if not readers or is_dotted(chosen) or chosen in readers:
            continue
        if (name == "epsilon" and algorithm.components == "decoupled") or (
            name == "scale" and algorithm.scale in ("none", "batch_std")
        ):
            continue
        options = " or ".join(f'"{reader}"' for reader in readers)
        several = f"algorithm.{setting} to {options}" if len(readers) > 1 else f"algorithm.{setting} = {options}"
        return Idle(f'algorithm.{setting} = "{chosen}"', f"set {several}")
    return None
