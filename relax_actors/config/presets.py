"""Presets of [algorithm]: the settings of the papers' algorithms, by name.

A preset only fills settings that the user did not set. Settings that it does not name keep the defaults of the schema.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from relax_actors.config.data_presets import OF_DATA
from relax_actors.config.preset import Preset
from relax_actors.config.sampled_presets import SAMPLED

PRESETS: dict[str, Preset] = SAMPLED | OF_DATA
"""Presets by the value of `algorithm.name`."""


def named(name: str) -> Preset:
    """Return a preset; raises ValueError if there is no preset of that name."""
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        msg = f"algorithm.name = {name!r} is not a known preset; {hint}known: {', '.join(PRESETS)}"
        raise ValueError(msg)
    return PRESETS[name]


def filled(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of [algorithm], the rest taken from the preset; raises ValueError if there is none."""
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
    merged = dict(defaults) | dict(tree)
    for name, value in defaults.items():
        if isinstance(value, Mapping) and isinstance(tree.get(name), Mapping) and name != "losses":  # replaced whole
            merged[name] = _merged(value, tree[name])
    return merged
