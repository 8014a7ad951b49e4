"""Protocols of backends, which check a configuration and build engines.

A backend is an object, or a class without constructor arguments, in a module that does not import its engine. It is
named by a built-in name (`relax_actors.registry.catalog`), an entry point of a package, or a dotted path. A subclass of
the protocol inherits what most backends answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from relax_actors.config import Config
from relax_actors.engines.protocols.critic import CriticEngine, RankCritic
from relax_actors.engines.protocols.footprint import TRAINED_BYTES, Footprint, follower_bytes, node_copy_bytes
from relax_actors.engines.protocols.inference import InferenceEngine
from relax_actors.engines.protocols.scoring import ScoringEngine
from relax_actors.engines.protocols.server import ServerSpec
from relax_actors.engines.protocols.training import RankEngine, TrainingEngine
from relax_actors.errors import ConfigError
from relax_actors.runtime import Context

if TYPE_CHECKING:  # only ranks need torch
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True, slots=True)
class Ranks:
    """Processes that share an engine.

    Attributes:
        count: how many; with 1 the engine is in the actor's process.
        remote: how many of them are on other nodes, the last ones.
        parts: calls of `accumulate` that they compute together; None if they wait for the whole step.
    """

    count: int = 1
    remote: int = 0
    parts: int | None = 1


class Backend(Protocol):
    """What backends of a configuration section have in common.

    Attributes:
        has_adapters: whether the engine computes with the adapter of [lora]; a run with one is refused otherwise.
    """

    has_adapters: bool = False

    def check(self, config: Config, model: Path) -> Iterator[str]:  # noqa: ARG002 of a protocol
        """Check the configuration before a run starts, without importing the engine.

        Args:
            config: configuration of the run.
            model: model folder, with its config.json; for a critic `critic.path`, or that of the policy.

        Yields:
            Notes for the user.

        Raises:
            ConfigError: the engine is not installed, or cannot run this model or configuration.
        """
        yield from ()

    def footprint(self, config: Config) -> Footprint:  # noqa: ARG002 of a protocol
        """Return what an actor needs; of a trainer without a reference and copies of weights for other actors."""
        return Footprint(parameter_bytes=TRAINED_BYTES)


class InferenceBackend(Backend, Protocol):
    """Builds the engine of rollout actors; named by `rollout.backend`.

    Attributes:
        has_entropies: whether the engine gives `Generation.entropies`; a run with record.entropy is refused otherwise.
        repeats_samples: whether the samples of a row follow from weights, prompt and seed with run.deterministic, so
            that `relax replay RUN --rollout` can draw them again.
    """

    has_entropies: bool = False
    repeats_samples: bool = False

    def build(self, context: Context) -> InferenceEngine:
        """Build the engine of one actor, in the actor's process.

        Raises:
            ConfigError: the configuration cannot work on this node.
        """

    def build_frozen(self, context: Context, model: Path, device: str) -> InferenceEngine:  # noqa: ARG002 of a protocol
        """Build an engine of a frozen model for a judge or a teacher; its weights are version 0.

        Args:
            context: context of the actor.
            model: model folder with weights and tokenizer.
            device: torch device, or "auto".

        Raises:
            ConfigError: the backend generates with the policy alone, or the folder has no weights that fit its model.
        """
        msg = f"{type(self).__name__} generates with the policy alone, and not with the frozen model {model}"
        raise ConfigError(msg)

    def check_frozen(self, config: Config, model: Path, setting: str) -> Iterator[str]:  # noqa: ARG002 of a protocol
        """Check that the backend can generate with a frozen model; see `Backend.check`.

        Args:
            config: configuration of the run.
            model: folder of the frozen model.
            setting: configuration key that names the backend, with its value, for errors.
        """
        yield from ()
        if type(self).build_frozen is InferenceBackend.build_frozen:
            msg = f'{setting} generates with the policy alone; set it to "transformers" or "sglang"'
            raise ConfigError(msg)

    def server(self, config: Config) -> ServerSpec | None:  # noqa: ARG002 of a protocol
        """Return how to run an inference server for each rollout actor; None if the engine needs none.

        The supervisor of the node restarts the server like an actor, and stops it after the actor of its number.
        """
        return None

    def check_engine(self, config: Config, url: str, key: str) -> None:  # noqa: ARG002 of a protocol
        """Check a server that is to join a live run, in the process of the root, which imports no torch.

        Args:
            config: configuration of the run.
            url: address of the server.
            key: its API key; empty without one.

        Raises:
            EngineError: it does not answer.
            ConfigError: it serves another model, or the backend uses no servers of others.
        """
        msg = (
            f'rollout.backend = "{config.rollout.backend}" uses no servers that the run does not start; external '
            'engines need "sglang"'
        )
        raise ConfigError(msg)

    def engine_fault(self, url: str, key: str) -> str:  # noqa: ARG002 of a protocol
        """Return why a server that has joined does not answer now; empty if it does."""
        return ""

    def footprint(self, config: Config) -> Footprint:
        """Return what an actor needs, with its server."""
        return Footprint(parameter_bytes=follower_bytes(config), node_bytes=node_copy_bytes(config))


class TrainingBackend(Backend, Protocol):
    """Builds the engine of the trainer; named by `trainer.backend`."""

    def build(self, context: Context) -> TrainingEngine:
        """Build the engine, in the trainer's process.

        Raises:
            ConfigError: the configuration cannot work on this node.
        """

    def ranks(self, config: Config) -> Ranks:  # noqa: ARG002 of a protocol
        """Return the processes that share the engine."""
        return Ranks()

    def build_rank(self, config: Config, rank: int, store: Store) -> RankEngine:
        """Build the engine of a rank, in the rank's process; see `ranks`.

        Args:
            config: configuration of the run.
            rank: number of the rank.
            store: rendezvous of the ranks.
        """
        raise NotImplementedError

    def rank_footprint(self, config: Config) -> Footprint:  # noqa: ARG002 of a protocol
        """Return what an actor `trainer_rank` needs, with the rank that it hosts."""
        return Footprint()


class CriticBackend(Backend, Protocol):
    """Builds the engine of the role `critic`; named by `critic.backend`."""

    def build(self, context: Context) -> CriticEngine:
        """Build the engine, in the process of the critic's actor. The configuration has a section [critic].

        Raises:
            ConfigError: the configuration cannot work on this node.
        """

    def ranks(self, config: Config) -> Ranks:  # noqa: ARG002 of a protocol
        """Return the processes that share the engine."""
        return Ranks()

    def build_rank(self, config: Config, rank: int, store: Store) -> RankCritic:
        """Build the engine of a rank, in the rank's process; see `TrainingBackend.build_rank`."""
        raise NotImplementedError


class ScoringBackend(Protocol):
    """Builds the engines of the roles `reference` and `actor_fwd`; named by their option `backend`.

    A backend whose engines compute with the adapter of [lora] has an attribute `has_adapters` that is true.
    """

    def build(self, context: Context, device: str, *, follows: bool) -> ScoringEngine:
        """Build the engine of one actor, in the actor's process.

        Args:
            context: context of the actor.
            device: torch device, or "auto".
            follows: whether the engine follows the newest weights, which may arrive as deltas; otherwise it keeps one
                version.

        Raises:
            ConfigError: the configuration cannot work on this node.
        """

    def check(self, config: Config, model: Path, setting: str) -> Iterator[str]:
        """Check the configuration before a run starts; see `Backend.check`.

        Args:
            config: configuration of the run.
            model: model folder, with its config.json.
            setting: configuration key that names the backend, for errors.
        """
