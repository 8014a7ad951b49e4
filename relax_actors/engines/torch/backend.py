"""Backends named "torch": of the trainer, of the critic, and of scoring roles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from relax_actors.config import Config
from relax_actors.config.training import TorchSection
from relax_actors.engines.backends import critic_section
from relax_actors.engines.protocols import ScoringEngine, TrainingEngine
from relax_actors.engines.protocols.backend import CriticBackend, Ranks, TrainingBackend
from relax_actors.engines.protocols.critic import CriticEngine, RankCritic
from relax_actors.engines.protocols.footprint import Footprint, trained_bytes
from relax_actors.engines.protocols.training import RankEngine
from relax_actors.engines.ranks.group import CriticGroup, start_trainer
from relax_actors.engines.torch.architectures import (
    check_architecture,
    check_layers,
    check_score_head,
    check_value_head,
)
from relax_actors.errors import ConfigError
from relax_actors.runtime import Context

if TYPE_CHECKING:  # only ranks need torch
    from torch._C._distributed_c10d import Store


def check_settings(config: Config, section: TorchSection, name: str, model: Path) -> None:
    """Refuse settings of a section [trainer.torch] or [critic.torch], and recomputation, that do not work.

    Raises:
        ConfigError: attention alone is to be recomputed, of which the torch engine keeps little, or the model names no
            layers to recompute or to share.
    """
    if config.trainer.recompute == "selective":
        msg = (
            'trainer.recompute = "selective" recomputes attention, of which torch engines, of trainer and critic, keep '
            'little; set trainer.recompute = "full" or "none"'
        )
        raise ConfigError(msg)
    needs = {
        "trainer.recompute": config.trainer.recompute == "full",
        f"{name}.ranks": section.ranks > 1,
        f"{name}.offload": section.offload,
    }
    for setting in (setting for setting, is_set in needs.items() if is_set):
        check_layers(model, setting)


class TorchTrainingBackend(TrainingBackend):
    """Trains with torch in the process of the trainer, or in ranks that share the model; see `TrainingBackend`."""

    has_adapters = True

    def build(self, context: Context) -> TrainingEngine:
        """Build the engine with its model and optimizer, or start the ranks."""
        if context.config.trainer.torch.ranks > 1:
            return start_trainer(context)
        from relax_actors.engines.torch.engine import TorchEngine  # noqa: PLC0415 only a process that trains needs torch
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415

        configure_torch(context.config.run)
        return TorchEngine(context.config)

    def ranks(self, config: Config) -> Ranks:
        """Return the ranks of [trainer.torch], which all train different sequences."""
        return _ranks(config.trainer.torch)

    def build_rank(self, config: Config, rank: int, store: Store) -> RankEngine:
        """Build the part of a rank."""
        from relax_actors.engines.torch.engine import TorchEngine  # noqa: PLC0415 only a process that trains needs torch
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415

        configure_torch(config.run)
        return TorchEngine(config, rank, store)

    def check(self, config: Config, model: Path) -> Iterator[str]:
        """Refuse models that transformers cannot build."""
        check_architecture(config, model)
        if config.algorithm.trains_scores:
            check_score_head(model, of_steps=config.algorithm.rows == "steps")
        check_settings(config, config.trainer.torch, "trainer.torch", model)
        if (ranks := config.trainer.torch.ranks) > 1:
            yield f"the trainer has {ranks} ranks, each with 1/{ranks} of weights, gradients and optimizer state"

    def footprint(self, config: Config) -> Footprint:
        """Return what the trainer needs with its ranks, which share the model."""
        return _footprint(config, config.trainer.torch)


class TorchScoringBackend:
    """Scores with torch in the process of the actor; see `ScoringBackend`."""

    has_adapters = True

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

    has_adapters = True

    def build(self, context: Context) -> CriticEngine:
        """Build the engine with its model and optimizer, or start the ranks."""
        if critic_section(context.config).torch.ranks > 1:
            return CriticGroup(context.config)
        from relax_actors.engines.torch.critic import TorchCritic  # noqa: PLC0415 only a process that trains needs torch
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415

        configure_torch(context.config.run)
        return TorchCritic(context.config, critic_section(context.config))

    def ranks(self, config: Config) -> Ranks:
        """Return the ranks of [critic.torch]."""
        return _ranks(critic_section(config).torch)

    def build_rank(self, config: Config, rank: int, store: Store) -> RankCritic:
        """Build the part of a rank."""
        from relax_actors.engines.torch.critic import TorchCritic  # noqa: PLC0415 only a process that trains needs torch
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415

        configure_torch(config.run)
        return TorchCritic(config, critic_section(config), rank, store)

    def check(self, config: Config, model: Path) -> Iterator[str]:
        """Refuse models that transformers cannot build with a value head."""
        check_value_head(model)
        check_settings(config, critic_section(config).torch, "critic.torch", model)
        if (ranks := critic_section(config).torch.ranks) > 1:
            yield f"the critic has {ranks} ranks, each with 1/{ranks} of weights, gradients and optimizer state"

    def footprint(self, config: Config) -> Footprint:
        """Return what the critic needs with its ranks, which share the model."""
        return _footprint(config, critic_section(config).torch)


def _ranks(section: TorchSection) -> Ranks:
    return Ranks(section.ranks, parts=section.ranks)


def _footprint(config: Config, section: TorchSection) -> Footprint:
    if section.ranks == 1:
        return Footprint(parameter_bytes=trained_bytes(config, offload=section.offload))
    ranks, size = section.ranks, trained_bytes(config, section.ranks)
    return Footprint(processes=ranks + 1, parameter_bytes=size, gpus=ranks, computes_on_cpu=False)
