"""Backends named "torch": of the trainer, of the critic, and of scoring roles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from relax_actors.config import Config
from relax_actors.engines.backends import critic_section
from relax_actors.engines.protocols import ScoringEngine, TrainingEngine
from relax_actors.engines.protocols.backend import CriticBackend, TrainingBackend
from relax_actors.engines.protocols.critic import CriticEngine
from relax_actors.engines.torch.architectures import check_architecture, check_value_head
from relax_actors.errors import ConfigError
from relax_actors.runtime import Context


def check_recompute(config: Config) -> None:
    """Refuse to recompute attention alone, of which the torch engine keeps little.

    Raises:
        ConfigError: it is set.
    """
    if config.trainer.recompute == "selective":
        msg = (
            'trainer.recompute = "selective" recomputes attention, of which torch engines, of trainer and critic, keep '
            'little; set trainer.recompute = "full" or "none"'
        )
        raise ConfigError(msg)


class TorchTrainingBackend(TrainingBackend):
    """Trains with torch in the process of the trainer; see `TrainingBackend`."""

    def build(self, context: Context) -> TrainingEngine:
        """Build the engine with its model and optimizer."""
        from relax_actors.engines.torch.engine import TorchEngine  # noqa: PLC0415 only a process that trains needs torch
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415

        configure_torch(context.config.run)
        return TorchEngine(context.config)

    def check(self, config: Config, model: Path) -> Iterator[str]:
        """Refuse models that transformers cannot build."""
        check_architecture(config, model)
        check_recompute(config)
        yield from ()


class TorchScoringBackend:
    """Scores with torch in the process of the actor; see `ScoringBackend`."""

    def build(self, context: Context, device: str, *, follows: bool) -> ScoringEngine:
        """Build the engine with its model."""
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415 only a process that scores needs torch
        from relax_actors.engines.torch.scorer import TorchScorer  # noqa: PLC0415

        configure_torch(context.config.run)
        return TorchScorer(context.config, device, follows=follows)

    def check(self, config: Config, model: Path, setting: str) -> Iterator[str]:
        """Refuse models that transformers cannot build."""
        del setting
        check_architecture(config, model)
        yield from ()


class TorchCriticBackend(CriticBackend):
    """Trains a critic with torch in the process of its actor; see `CriticBackend`."""

    def build(self, context: Context) -> CriticEngine:
        """Build the engine with its model and optimizer."""
        from relax_actors.engines.torch.critic import TorchCritic  # noqa: PLC0415 only a process that trains needs torch
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415

        configure_torch(context.config.run)
        return TorchCritic(context.config, critic_section(context.config))

    def check(self, config: Config, model: Path) -> Iterator[str]:
        """Refuse models that transformers cannot build with a value head."""
        check_recompute(config)
        check_value_head(model)
        yield from ()
