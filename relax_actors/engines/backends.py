"""Load the backends that a configuration names."""

from __future__ import annotations

from typing import Any

from relax_actors.config import Config
from relax_actors.config.training import CriticSection
from relax_actors.engines.protocols.backend import CriticBackend, InferenceBackend, ScoringBackend, TrainingBackend
from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import CRITIC_ENGINES, INFERENCE_ENGINES, SCORING_ENGINES, TRAINING_ENGINES
from relax_actors.registry.registry import Registry


def inference_backend(config: Config) -> InferenceBackend:
    """Load the backend named by `rollout.backend`.

    Raises:
        ConfigError: the name is unknown, or its module cannot be imported.
    """
    backend: InferenceBackend = _instance(INFERENCE_ENGINES, config.rollout.backend, "rollout.backend")
    return backend


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


def critic_section(config: Config) -> CriticSection:
    """Section [critic] of a run that has a critic.

    Raises:
        ConfigError: it is missing.
    """
    if config.critic is None:
        msg = "role critic needs a section [critic]; add it"
        raise ConfigError(msg)
    return config.critic


def refuse_options(config: Config, section: str) -> None:
    """Check that no options are set for a built-in engine, which has none.

    Args:
        config: configuration of the run.
        section: "rollout" or "trainer".

    Raises:
        ConfigError: options are set.
    """
    settings = getattr(config, section)
    if settings.options:
        msg = f"{section}.options: the backend {settings.backend!r} takes none; remove {', '.join(settings.options)}"
        raise ConfigError(msg)


def _instance(registry: Registry[Any], name: str, setting: str) -> Any:
    found = registry.load(name, setting)
    return found() if isinstance(found, type) else found
