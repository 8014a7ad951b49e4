"""Checks of backends: settings of one that the run does not use, and processes that the machine has no room for."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

from pydantic import BaseModel

from relax_actors.cli.machine import count_gpus, has_gpu, usable_cores
from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import CRITIC_ENGINES, INFERENCE_ENGINES, TRAINING_ENGINES

BACKENDS = {"rollout": INFERENCE_ENGINES, "trainer": TRAINING_ENGINES, "critic": CRITIC_ENGINES}
"""Sections with a setting `backend`; a backend has its own settings in the table of its name, if there is one."""


def unused_settings(config: Config, spelled: Collection[str] = ()) -> Iterator[str]:
    """Yield a line for each setting of a backend that the run does not use.

    Args:
        config: configuration of the run.
        spelled: dotted names that the file or an override sets; without them, settings that differ from the default.
    """
    for section, name, table in _other_tables(config):
        defaults = type(table)().model_dump(mode="json")
        for key, value in table.model_dump(mode="json").items():
            setting = f"{section}.{name}.{key}"
            if setting in spelled or value != defaults[key]:
                yield (
                    f"{setting} = {json.dumps(value)} has no effect with {section}.backend = "
                    f'"{getattr(config, section).backend}"; set {section}.backend = "{name}", or remove it'
                )


def _other_tables(config: Config) -> Iterator[tuple[str, str, BaseModel]]:
    """Yield section and name of each backend that is not chosen, with the table of its settings."""
    for section, registry in BACKENDS.items():
        settings = getattr(config, section)
        for name in registry.built_in:
            table = getattr(settings, name, None)
            if isinstance(table, BaseModel) and settings.backend != name:
                yield section, name, table


def check_ranks(config: Config, here: Collection[str]) -> Iterator[str]:
    """Compare the ranks of trainer and critic with the GPUs of this machine, or with its cores.

    Args:
        config: configuration of the run.
        here: roles whose actors start on this machine.

    Raises:
        ConfigError: there are more ranks, and the device is not set to "cpu".
    """
    for role in ("trainer", "critic"):
        section = getattr(config, role)
        if section is None or role not in here or section.ranks == 1 or section.device not in ("auto", "cpu"):
            continue  # a named GPU is checked with the devices
        setting = f"{role}.{section.backend}.ranks = {section.ranks}"
        if section.device == "auto" and has_gpu():
            if section.ranks > (gpus := count_gpus()):
                msg = f"{setting}: this machine has {gpus} GPUs, and each rank needs one; set it to at most {gpus}"
                raise ConfigError(msg)
        elif section.ranks > (cores := usable_cores()):
            if section.device == "auto":
                msg = (
                    f"{setting}: this machine has no GPU and {cores} cores; set at most {cores} ranks, or "
                    f'{role}.device = "cpu" for ranks that share cores'
                )
                raise ConfigError(msg)
            yield f"{setting} on {cores} cores: ranks wait for each other's cores"
