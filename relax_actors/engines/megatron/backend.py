"""Backend "megatron" of the trainer, of the critic, and of scoring roles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_actors.config import Config
from relax_actors.config.training import MegatronSection
from relax_actors.engines.backends import critic_section
from relax_actors.engines.megatron import architecture, installation, layout
from relax_actors.engines.megatron.adapter_check import check_adapter
from relax_actors.engines.protocols import ScoringEngine, TrainingEngine
from relax_actors.engines.protocols.backend import CriticBackend, Ranks, TrainingBackend
from relax_actors.engines.protocols.critic import CriticEngine, RankCritic
from relax_actors.engines.protocols.footprint import ADAPTER_SHARE, STATE_BYTES, WEIGHT_BYTES, Footprint
from relax_actors.engines.protocols.training import RankEngine
from relax_actors.engines.ranks.group import CriticGroup, start_trainer
from relax_actors.engines.torch.architectures import check_score_head
from relax_actors.errors import ConfigError
from relax_actors.runtime import Context

if TYPE_CHECKING:  # only ranks need torch
    from torch._C._distributed_c10d import Store


class MegatronTrainingBackend(TrainingBackend):
    """Training with Megatron-Core, in one process or in a group of ranks; see `TrainingBackend`."""

    has_adapters = True

    def build(self, context: Context) -> TrainingEngine:
        """Build the model in this process, or start the ranks."""
        config = context.config
        if config.trainer.megatron.ranks > 1:
            return start_trainer(context)
        from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: PLC0415 imports torch
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415

        configure_torch(config.run)
        return MegatronEngine(config)

    def ranks(self, config: Config) -> Ranks:
        """Return the ranks of the layout."""
        return _ranks(config.trainer.megatron)

    def build_rank(self, config: Config, rank: int, store: Store) -> RankEngine:
        """Build the part of a rank."""
        from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: PLC0415 imports torch
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415

        configure_torch(config.run)
        return MegatronEngine(config, rank, store)

    def check(self, config: Config, model: Path) -> Iterator[str]:
        """Refuse models that Megatron-Core would compute differently, and layouts that cannot work."""
        if config.algorithm.trains_scores:
            check_score_head(model, of_steps=config.algorithm.rows == "steps")
        if config.trainer.fake_quant is not None:
            msg = (
                '[trainer.fake_quant] with trainer.backend = "megatron": its optimizer has its own weights, which are '
                'not moved to a grid; set trainer.backend = "torch", or leave the section out'
            )
            raise ConfigError(msg)
        yield from _check("trainer", found := layout.Layout.of(config.trainer.megatron), model)
        check_adapter(config, found, model, "trainer")
        if config.trainer.stream and not found.streams:
            yield (
                f"trainer.stream = true has no effect with trainer.megatron.pipeline_parallel = {found.pipeline}: a "
                "step is computed when all of its rows are there, because each early part would fill and drain the "
                "pipeline; set trainer.stream = false to say so, or use data, tensor or context parallelism"
            )

    def footprint(self, config: Config) -> Footprint:
        """Return what the trainer needs with its ranks."""
        megatron = config.trainer.megatron
        return _footprint(config, megatron, megatron.own_ranks)

    def rank_footprint(self, config: Config) -> Footprint:
        """Return what an actor needs with its rank."""
        return _footprint(config, config.trainer.megatron, 1)


class MegatronCriticBackend(CriticBackend):
    """A critic with Megatron-Core, in the actor's process or in a group of ranks; see `CriticBackend`."""

    has_adapters = True

    def build(self, context: Context) -> CriticEngine:
        """Build the model in this process, or start the ranks."""
        config, settings = context.config, critic_section(context.config)
        if settings.megatron.ranks > 1:
            return CriticGroup(config)
        from relax_actors.engines.megatron.mcore.critic import MegatronCritic  # noqa: PLC0415 imports torch
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415

        configure_torch(config.run)
        return MegatronCritic(config, settings)

    def ranks(self, config: Config) -> Ranks:
        """Return the ranks of the layout."""
        return _ranks(critic_section(config).megatron)

    def build_rank(self, config: Config, rank: int, store: Store) -> RankCritic:
        """Build the part of a rank."""
        from relax_actors.engines.megatron.mcore.critic import MegatronCritic  # noqa: PLC0415 imports torch
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415

        configure_torch(config.run)
        return MegatronCritic(config, critic_section(config), rank, store)

    def check(self, config: Config, model: Path) -> Iterator[str]:
        """Refuse models that Megatron-Core would compute differently, and layouts that cannot work."""
        if (megatron := critic_section(config).megatron).remote_ranks:
            msg = (
                f"critic.megatron.local_ranks = {megatron.local_ranks}: the ranks of a critic are all on its node; "
                "leave local_ranks out, and set fewer ranks if the node has no room for them"
            )
            raise ConfigError(msg)
        yield from _check("critic", found := layout.Layout.of(megatron), model)
        check_adapter(config, found, model, "critic")

    def footprint(self, config: Config) -> Footprint:
        """Return what the critic needs with its ranks."""
        megatron = critic_section(config).megatron
        return _footprint(config, megatron, megatron.ranks)


class MegatronScoringBackend:
    """Scoring in the actor's process with Megatron-Core; see `ScoringBackend`."""

    has_adapters = True

    def build(self, context: Context, device: str, *, follows: bool) -> ScoringEngine:
        """Build the model."""
        from relax_actors.engines.megatron.mcore.scorer import MegatronScorer  # noqa: PLC0415 imports torch
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415

        configure_torch(context.config.run)
        return MegatronScorer(context.config, device, follows=follows)

    def check(self, config: Config, model: Path, setting: str) -> Iterator[str]:
        """Refuse models that Megatron-Core would compute differently."""
        role = setting.removesuffix(".backend")
        installation.require(role)
        architecture.check(architecture.decoder_fields(_body(model)))
        check_adapter(config, layout.Layout.of(MegatronSection()), model, role)
        yield from ()


def _ranks(section: MegatronSection) -> Ranks:
    shape = layout.Layout.of(section)
    return Ranks(section.ranks, section.remote_ranks, shape.data if shape.streams else None)


def _footprint(config: Config, section: MegatronSection, ranks: int) -> Footprint:
    """Return what an actor with some of the ranks of a group needs.

    Weights are in `trainer.precision`; weights and gradients of the optimizer are in float32 besides. An adapter leaves
    all but its own weights without them.
    """
    weight: float = WEIGHT_BYTES["float32"]
    state: float = STATE_BYTES
    model: float = 2 * weight
    if (precision := config.trainer.precision) != "float32":
        model, state = WEIGHT_BYTES[precision] + weight, state + weight
    if config.lora is not None:
        model, state = WEIGHT_BYTES[precision] + ADAPTER_SHARE * (model + state), 0
    copies = max(1, section.ranks // (section.tensor_parallel * section.pipeline_parallel))
    whole = model * copies + state * (1 if section.distributed_optimizer else copies)
    return Footprint(
        processes=ranks + 1 if section.ranks > 1 else 1,  # ranks of a group are beside the actor's process
        parameter_bytes=whole * ranks / section.ranks,
        gpus=ranks,
        computes_on_cpu=False,
    )


def _check(role: str, shape: layout.Layout, model: Path) -> Iterator[str]:
    installation.require(role)
    if shape.grouped_experts is True:
        installation.require_grouped_product(role)
    body = _body(model)
    fields = architecture.decoder_fields(body)
    architecture.check(fields, f"{role}.backend")
    layout.check(shape, fields, f"{role}.megatron")
    layout.check_towers(shape, body, f"{role}.megatron")
    if shape.ranks > 1:
        sizes = ", ".join(f"{name} {size}" for name, size in shape.groups().items() if size > 1)
        yield f"the {role} has {shape.ranks} ranks: {sizes}"


def _body(model: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((model / "config.json").read_text())
    return body
