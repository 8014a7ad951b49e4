"""Load the backends that a configuration names, and find settings of others."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from relax_actors.config import Config
from relax_actors.config.training import CriticSection, LossScaleSection
from relax_actors.engines.protocols.backend import CriticBackend, InferenceBackend, ScoringBackend, TrainingBackend
from relax_actors.engines.protocols.footprint import Footprint
from relax_actors.engines.protocols.inference import InferenceEngine
from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import CRITIC_ENGINES, INFERENCE_ENGINES, SCORING_ENGINES, TRAINING_ENGINES
from relax_actors.registry.registry import Registry
from relax_actors.runtime import Context

BACKENDS = {"rollout": INFERENCE_ENGINES, "trainer": TRAINING_ENGINES, "critic": CRITIC_ENGINES}
"""Sections with a setting `backend`; a backend has its own settings in the table of its name, if there is one."""


def inference_backend(config: Config) -> InferenceBackend:
    """Load the backend named by `rollout.backend`; raises ConfigError if it is unknown or cannot be imported."""
    backend: InferenceBackend = _instance(INFERENCE_ENGINES, config.rollout.backend, "rollout.backend")
    return backend


def frozen_engine(context: Context, name: str, setting: str, model: Path, device: str) -> InferenceEngine:
    """Build an inference engine of a frozen model folder; see `InferenceBackend.build_frozen`."""
    backend: InferenceBackend = _instance(INFERENCE_ENGINES, name, setting)
    return backend.build_frozen(context, model, device)


def check_frozen(config: Config, name: str, setting: str, model: Path) -> Iterator[str]:
    """Check that a backend can generate with a frozen model; see `InferenceBackend.check_frozen`."""
    backend: InferenceBackend = _instance(INFERENCE_ENGINES, name, setting)
    if hasattr(backend, "check_frozen"):
        yield from backend.check_frozen(config, model, f'{setting} = "{name}"')
    elif not hasattr(backend, "build_frozen"):
        msg = f'{setting} = "{name}" generates with the policy alone; set it to "transformers" or "sglang"'
        raise ConfigError(msg)


def refuse_shared_device(config: Config, role: str, setting: str) -> None:
    """Refuse a server of a frozen model on a device that other roles share, since its memory stays there.

    Raises:
        ConfigError: the role is in a group of placement.colocate whose members release their memory.
    """
    if config.placement.leaves_device(role):
        msg = (
            f"{setting}: its server keeps its memory while other roles of placement.colocate compute; leave {role} out "
            "of the group, or choose an engine in the actor's process"
        )
        raise ConfigError(msg)


def training_backend(config: Config) -> TrainingBackend:
    """Load the backend named by `trainer.backend`; errors as `inference_backend`."""
    backend: TrainingBackend = _instance(TRAINING_ENGINES, config.trainer.backend, "trainer.backend")
    return backend


def critic_backend(section: CriticSection) -> CriticBackend:
    """Load the backend named by `critic.backend`; errors as `inference_backend`."""
    backend: CriticBackend = _instance(CRITIC_ENGINES, section.backend, "critic.backend")
    return backend


def scoring_backend(name: str, setting: str) -> ScoringBackend:
    """Load a scoring backend by name; errors as `inference_backend`, with the configuration key `setting`."""
    backend: ScoringBackend = _instance(SCORING_ENGINES, name, setting)
    return backend


def check_adapters(config: Config, backend: object, setting: str, name: str) -> None:
    """Raise ConfigError if the run trains an adapter that the engine's backend cannot compute with."""
    if config.lora is None or getattr(backend, "has_adapters", False):
        return
    known = '"transformers" or "sglang"' if setting.startswith("rollout") else '"torch" or "megatron"'
    msg = f'{setting} = "{name}" computes with the weights of whole models; set it to {known}, or remove [lora]'
    raise ConfigError(msg)


def footprints(config: Config) -> dict[str, Footprint]:
    """Return what an actor of each role with a backend needs: trainer, its ranks elsewhere, critic, rollout."""
    critic = {} if config.critic is None else {"critic": critic_backend(config.critic).footprint(config)}
    trainer = training_backend(config)
    ranks = {} if config.trainer_rank is None else {"trainer_rank": trainer.rank_footprint(config)}
    rollout = {} if not config.generates else {"rollout": inference_backend(config).footprint(config)}
    return {"trainer": trainer.footprint(config), **ranks, **critic, **rollout}


def critic_section(config: Config) -> CriticSection:
    """Section [critic] of a run that has a critic; raises ConfigError if it is missing."""
    if config.critic is None:
        msg = "role critic needs a section [critic]; add it"
        raise ConfigError(msg)
    return config.critic


def unused_settings(config: Config, spelled: Collection[str] = ()) -> Iterator[str]:
    """Yield a line for each setting of a backend that the run does not use, and for options that none reads.

    Without `spelled`, the dotted names that the file or an override sets, these are settings that differ from the
    default.
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
    if config.trainer.precision != "float16":
        for key, value in config.trainer.loss_scale.model_dump(mode="json").items():
            setting = f"trainer.loss_scale.{key}"
            if setting in spelled or value != LossScaleSection.model_fields[key].default:
                yield (
                    f"{setting} = {json.dumps(value)} has no effect with trainer.precision = "
                    f'"{config.trainer.precision}"; set trainer.precision = "float16", or remove it'
                )
    for section in ("rollout", "trainer"):
        settings = getattr(config, section)
        if settings.options and settings.backend in BACKENDS[section].built_in:
            given = ", ".join(settings.options)
            yield f"{section}.options: the backend {settings.backend!r} takes none; remove {given}"


def _other_tables(config: Config) -> Iterator[tuple[str, str, BaseModel]]:
    """Yield section and name of each backend that is not chosen, with the table of its settings."""
    for section, registry in BACKENDS.items():
        settings = getattr(config, section)
        for name in registry.built_in:
            table = getattr(settings, name, None)
            if isinstance(table, BaseModel) and settings.backend != name:
                yield section, name, table


def _instance(registry: Registry[Any], name: str, setting: str) -> Any:
    backend = registry.load(name, setting)
    return backend() if isinstance(backend, type) else backend
