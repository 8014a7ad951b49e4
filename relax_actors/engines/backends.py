"""Find the backends that a configuration names."""

from __future__ import annotations

from typing import Any

from relax_actors.config import Config
from relax_actors.engines.protocols.backend import InferenceBackend, ScoringBackend, TrainingBackend
from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import INFERENCE_ENGINES, SCORING_ENGINES, TRAINING_ENGINES
from relax_actors.registry.registry import Registry


def inference_backend(config: Config) -> InferenceBackend:
    """The backend of `rollout.backend`.

    Raises:
        ConfigError: it does not import, or is not a backend.
    """
    backend: InferenceBackend = _instance(INFERENCE_ENGINES, config.rollout.backend, "rollout.backend")
    return backend


def training_backend(config: Config) -> TrainingBackend:
    """The backend of `trainer.backend`; errors as `inference_backend`."""
    backend: TrainingBackend = _instance(TRAINING_ENGINES, config.trainer.backend, "trainer.backend")
    return backend


def scoring_backend(name: str, setting: str) -> ScoringBackend:
    """The backend of a role that scores; errors as `inference_backend`."""
    backend: ScoringBackend = _instance(SCORING_ENGINES, name, setting)
    return backend


def refuse_options(config: Config, section: str) -> None:
    """Refuse the options of a built-in engine, which has none.

    Args:
        config: of the run.
        section: "rollout" or "trainer".

    Raises:
        ConfigError: there are some.
    """
    settings = getattr(config, section)
    if settings.options:
        msg = f"{section}.options: the backend {settings.backend!r} takes none; remove {', '.join(settings.options)}"
        raise ConfigError(msg)


def _instance(registry: Registry[Any], name: str, setting: str) -> Any:
    found = registry.load(name, setting)
    return found() if isinstance(found, type) else found
