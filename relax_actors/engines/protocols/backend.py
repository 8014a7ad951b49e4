"""Protocols of backends: how an engine is built, checked before a run starts, and served.

A backend is a small object, or a class that is called without arguments, in a module that does not import its engine.
It is registered by name (`relax_actors.registry.catalog`), as an entry point of a package, or named by its dotted path.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from relax_actors.config import Config
from relax_actors.engines.protocols.inference import InferenceEngine
from relax_actors.engines.protocols.scoring import ScoringEngine
from relax_actors.engines.protocols.training import TrainingEngine
from relax_actors.runtime import Context


class InferenceBackend(Protocol):
    """Builds the engine of a rollout actor; the value of `rollout.backend`."""

    def build(self, context: Context) -> InferenceEngine:
        """Build the engine of one actor, in the actor's process.

        Raises:
            ConfigError: the configuration cannot work on this node.
        """

    def check(self, config: Config, model: Path) -> Iterator[str]:
        """Check the configuration before a run starts, without importing the engine; yields notes for the user.

        Args:
            config: of the run.
            model: the model's folder, with its config.json.

        Raises:
            ConfigError: the engine is not installed, or cannot run this model or configuration.
        """

    def server_module(self, config: Config) -> str:
        """Module that keeps an inference server beside each rollout actor; empty if none is needed.

        The node's supervisor starts `python -m MODULE RUN_FOLDER NUMBER`, restarts it as an actor, and stops it after
        the rollout actor of that number.
        """


class TrainingBackend(Protocol):
    """Builds the engine of the trainer; the value of `trainer.backend`."""

    def build(self, context: Context) -> TrainingEngine:
        """Build the engine, in the trainer's process.

        Raises:
            ConfigError: the configuration cannot work on this node.
        """

    def check(self, config: Config, model: Path) -> Iterator[str]:
        """Check the configuration before a run starts; see `InferenceBackend.check`."""


class ScoringBackend(Protocol):
    """Builds the engines of `reference` and `actor_fwd`; the value of their option `backend`."""

    def build(self, context: Context, device: str, *, follows: bool) -> ScoringEngine:
        """Build the engine of one actor, in the actor's process.

        Args:
            context: of the actor.
            device: torch device, or "auto".
            follows: whether it follows the newest weights, so that they may come as deltas; else it keeps one version.

        Raises:
            ConfigError: the configuration cannot work on this node.
        """

    def check(self, config: Config, model: Path, setting: str) -> Iterator[str]:
        """Check the configuration before a run starts; see `InferenceBackend.check`.

        Args:
            config: of the run.
            model: the model's folder, with its config.json.
            setting: the configuration key that names the backend, for errors.
        """
