"""Settings of [algorithm] that have no effect beside the others."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_actors.algorithms.named_functions import readers
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.algorithm_parts import PAIR_SETTINGS
from relax_actors.config.presets import filled, leaves
from relax_actors.registry.catalog import ADVANTAGES, CORRECTIONS, POLICY_LOSSES


@dataclass(frozen=True, slots=True)
class Idle:
    """Why a setting has no effect.

    Attributes:
        cause: setting that makes it idle, as `algorithm.kl.place = "none"`.
        remedy: what to set so that it has an effect.
    """

    cause: str
    remedy: str


DECOUPLED = Idle('algorithm.components = "decoupled"', 'set algorithm.components = "sum"')

CONDITIONS: tuple[tuple[tuple[str, ...], str, tuple[object, ...]], ...] = (
    (("observation_nll", "rivals"), "rows", ("sampled",)),
    (("length",), "aggregate", ("constant",)),
    (("weights",), "components", ("decoupled",)),
    (("kl.",), "kl.place", ("loss", "reward")),
    (("kl.k2_gradient", "kl.unbiased"), "kl.place", ("loss",)),
    (("kl.horizon",), "kl.target", ()),
    (("entropy.delta",), "entropy.target", ()),
    (("correction.level", "correction.normalise"), "correction.kind", ("importance", "tis", "icepop")),
    (("correction.high",), "correction.kind", ("tis", "icepop")),
    (("correction.low",), "correction.kind", ("tis", "icepop")),
    (("reject.low", "reject.high"), "reject.kind", ("geometric", "max", "product")),
    (("reject.max_kl",), "reject.kind", ("k2", "k3")),
    (("reject.counted",), "reject.kind", ("geometric", "max", "product", "k2", "k3")),
    (("distil.",), "distil.place", ("advantage", "loss")),
    (
        ("distil.kind", "distil.top_k", "distil.tail", "distil.teacher_weight", "distil.student_share"),
        "distil.place",
        ("loss",),
    ),
    (("distil.tail",), "distil.top_k", ()),
    (("distil.teacher_weight",), "distil.kind", ("jsd",)),
    (("pairs.",), "surrogate", ("preference",)),
    (("pairs.f_alpha",), "pairs.f_divergence", ("alpha",)),
    (("labels.",), "rows", ("labelled",)),
    (("pairs.", "labels."), "head", ("tokens",)),
    (("scores.",), "head", ("scores",)),
    (("scores.centring",), "rows", ("pairs",)),
    (("shaping.overlong_",), "shaping.overlong", (True,)),
)
"""Beginnings of the names of settings, with the setting that they need and its values; any value for ()."""


def written(algorithm: AlgorithmSection, spelled: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings that the user wrote, by dotted name.

    Without `spelled`, the dotted names that the file or an override sets, these are the settings that differ from those
    of the preset and its defaults. What only repeats a setting of the preset is left out.
    """
    values = dict(leaves(algorithm.model_dump(exclude={"name"})))
    preset = dict(leaves(filled({"name": algorithm.name})))
    unset = dict(leaves(AlgorithmSection.model_validate({"name": algorithm.name}).model_dump()))

    def is_written(key: str, value: Any) -> bool:
        return value != unset.get(key) or (f"algorithm.{key}" in spelled and key not in preset)

    return {key: value for key, value in values.items() if is_written(key, value)}


def idle(algorithm: AlgorithmSection) -> dict[str, Idle]:
    """Return the settings that have no effect, by dotted name."""
    values = dict(leaves(algorithm.model_dump()))
    reasons = {
        name: _part_reason(values, name) or _pair_reason(algorithm, name) or _function_reason(algorithm, name)
        for name in values
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _part_reason(values: Mapping[str, Any], name: str) -> Idle | None:
    """Why a setting is idle: the part of the algorithm that reads it is off."""
    for beginnings, key, options in CONDITIONS:
        value = values[key]
        registry = {"correction.kind": CORRECTIONS, "surrogate": POLICY_LOSSES}.get(key)
        is_own = registry is not None and value not in registry.built_in
        is_met = is_own or (value in options if options else value is not None)
        if not is_met and name.startswith(beginnings) and name != key:
            cause = f"algorithm.{key} unset" if value is None else f"algorithm.{key} = {json.dumps(value)}"
            return Idle(cause, f"set {_choice(key, options)}")
    return None


def _pair_reason(algorithm: AlgorithmSection, name: str) -> Idle | None:
    """Why a setting of [algorithm.pairs] is idle: none of the losses reads it."""
    names = PAIR_SETTINGS.get(name.removeprefix("pairs.")) if name.startswith("pairs.") else None
    if names is None or algorithm.pairs.losses.keys() & {*names}:
        return None
    return Idle(f"algorithm.pairs.losses of {_listed(algorithm.pairs.losses)}", f"add {_listed(names)} to them")


def _function_reason(algorithm: AlgorithmSection, name: str) -> Idle | None:
    """Why a setting is idle: the chosen function does not read it."""
    if algorithm.components == "decoupled" and name in ("scale", "epsilon"):
        # Each component is divided by its standard deviation.
        return DECOUPLED if name == "scale" else None
    if name == "correct_reward" and algorithm.positive_nll:
        return None
    if name == "gae_lambda" and algorithm.gae_alpha is not None and algorithm.advantage in readers(ADVANTAGES, name):
        return Idle(f"algorithm.gae_alpha = {algorithm.gae_alpha:g}", "leave algorithm.gae_alpha unset")
    for setting, chosen, registry in (
        ("advantage", algorithm.advantage, ADVANTAGES),
        ("surrogate", algorithm.surrogate, POLICY_LOSSES),
    ):
        names = readers(registry, name)
        if not names or chosen not in registry.built_in or chosen in names:
            continue
        if name == "scale" and algorithm.scale in ("none", "batch_std"):
            continue
        return Idle(f'algorithm.{setting} = "{chosen}"', f"set {_choice(setting, names)}")
    return None


def _choice(setting: str, options: Sequence[object]) -> str:
    """Return `algorithm.x = "a"`, or `algorithm.x to "a" or "b"`."""
    shown = _listed(options)
    return f"algorithm.{setting}" + (f" = {shown}" if len(options) == 1 else f" to {shown}" if options else "")


def _listed(options: Iterable[object]) -> str:
    return " or ".join(map(json.dumps, options))
