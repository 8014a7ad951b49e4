"""Settings of a run with some of them replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_actors.config import Config
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.load import apply_settings
from relax_actors.errors import ConfigError


def with_settings(config: Config, settings: list[str], source: str, **more: Mapping[str, Any]) -> Config:
    """Return a configuration with some settings replaced.

    Saved settings have a value for all keys. Where `algorithm.name` is replaced, those that the old preset had set are
    taken from the new one.

    Args:
        config: the saved configuration.
        settings: `section.key=value` each.
        source: where the settings come from, as errors call it.
        more: keys and values by section, which nobody may set.

    Raises:
        ConfigError: a setting is wrong.
    """
    tree = config.model_dump(mode="json")
    if any(setting.partition("=")[0].strip() == "algorithm.name" for setting in settings):
        preset = AlgorithmSection.model_validate({"name": config.algorithm.name})
        tree["algorithm"] = _without(tree["algorithm"], preset.model_dump(mode="json")) | {
            "name": tree["algorithm"]["name"]
        }
    for section, values in more.items():
        own = {setting.partition("=")[0].strip() for setting in settings}
        if wrong := sorted(f"{section}.{key}" for key in values if f"{section}.{key}" in own):
            msg = f"{wrong[0]} follows from the command here; leave it out"
            raise ConfigError(msg)
        tree[section] = {**tree[section], **values}
    return apply_settings(tree, settings, source)


def _without(tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a tree that differ from defaults."""
    kept: dict[str, Any] = {}
    for name, value in tree.items():
        default = defaults.get(name)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := _without(value, default):
                kept[name] = inner
        elif value != default:
            kept[name] = value
    return kept
