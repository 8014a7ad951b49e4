"""Engines for more than one rank: of the trainer and of the critic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from relax_actors.config import Config
from relax_actors.engines.backends import critic_backend, critic_section, training_backend
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.protocols.training import StepResult
from relax_actors.engines.ranks.rank_group import NO_OTHERS, JoinedRanks, OnRankExit, RankGroup
from relax_actors.engines.ranks.rpc import RankError, pack_samples
from relax_actors.runtime import Context


def start_trainer(context: Context) -> TrainerGroup:
    """Start the ranks of the trainer, on other nodes as well if the configuration says so."""
    ranks = training_backend(context.config).ranks(context.config)
    if not ranks.remote:
        return TrainerGroup(context.config)
    from relax_actors.engines.ranks.remote_ranks import RemoteRanks  # noqa: PLC0415 `relax check` needs no NATS

    remote = RemoteRanks(context, ranks.count - ranks.remote, ranks.remote)
    return TrainerGroup(context.config, join=remote.join)


def profile_of_rank(path: Path, rank: int) -> Path:
    """Return the file of a rank's profile, from the file of an engine without ranks."""
    name = path.name.removesuffix(".json.gz")
    return path.with_name(f"{name}.rank{rank}.json.gz")


class TrainerGroup(RankGroup):
    """Training engine for more than one rank; see `RankGroup`.

    Args:
        config: configuration of the run.
        on_rank_exit: by default this process ends like the rank.
        join: has the last ranks, on other nodes, join; by default all are on this one.
    """

    def __init__(
        self,
        config: Config,
        on_rank_exit: OnRankExit | None = None,
        join: Callable[[], JoinedRanks] = lambda: NO_OTHERS,
    ) -> None:
        super().__init__(config, "trainer", training_backend(config).ranks(config), on_rank_exit, join)

    def initialise(self, seed: int) -> None:
        """Load the model folder's weights, or draw random weights; see `TrainingEngine`."""
        self._kept.clear()
        self._call("initialise", seed)

    def warm_start(
        self, samples: Sequence[TrainSample], learning_rate: float, progress: Callable[[], None]
    ) -> StepResult:
        """Take one supervised step; see `TrainingEngine`."""
        return StepResult(self._call("warm_start", pack_samples(samples), learning_rate, progress=progress))

    def finish_warm_start(self) -> None:
        """Reset the optimizer and set the reference; see `TrainingEngine`."""
        self._call("finish_warm_start")

    def score(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute log-probs with the current weights; see `SupportsScore`."""
        return list(self._call("score", pack_samples(samples), progress=progress))

    @property
    def shards(self) -> int:
        """Files of a version, one for each rank; see `WeightProducer`."""
        return len(self._channels)

    def publish(self, *paths: Path) -> str:
        """Write the weights; see `WeightProducer`."""
        return str(self._call("publish", *map(str, paths)))

    def prefixes(self) -> bytes:
        """Digests of the first tensors; see `SupportsPrefixes`."""
        return bytes(self._call("prefixes"))

    def measure_gradients(self) -> None:
        """Measure the gradients of each micro-batch, of all ranks together; see `MeasuresGradients`."""
        self._call("measure_gradients")

    def remember(self) -> None:
        """Keep the weights as the base of the next delta; see `WeightProducer`."""
        self._call("remember")

    def delta(self) -> Callable[..., str] | None:
        """Writer of the change since `remember`; see `WeightProducer`."""
        return self._write_delta if self._call("delta") else None

    def _write_delta(self, *paths: Path) -> str:
        return str(self._call("write_delta", *map(str, paths)))

    def begin_profile(self) -> None:
        """Begin to record on all ranks; see `SupportsProfile`.

        Raises:
            RankError: a rank cannot record; then none does.
        """
        try:
            self._check_profile("begin_profile")
        except RankError:
            self.cancel_profile()
            raise

    def cancel_profile(self) -> None:
        """End the recording on all ranks without writing it; see `SupportsProfile`."""
        self._call("cancel_profile")

    def end_profile(self, path: Path) -> list[Path]:
        """Write a trace of each rank; see `SupportsProfile`.

        Raises:
            RankError: a rank cannot write its trace; the others have written theirs.
        """
        self._check_profile("end_profile", str(path))
        return [profile_of_rank(path, rank) for rank in range(self.shards)]

    def _check_profile(self, name: str, *arguments: Any) -> None:
        """Call a method of profiles, which returns its error, on all ranks, and raise the first error."""
        for rank, problem in enumerate(self._call_all(name, *arguments)):
            if problem:
                msg = f"rank {rank}: {problem}"
                raise RankError(msg)


class CriticGroup(RankGroup):
    """Critic for more than one rank; implements `CriticEngine`. See `RankGroup`.

    Args:
        config: configuration of the run.
        on_rank_exit: by default this process ends like the rank.
    """

    def __init__(self, config: Config, on_rank_exit: OnRankExit | None = None) -> None:
        super().__init__(config, "critic", critic_backend(critic_section(config)).ranks(config), on_rank_exit)

    def initialise(self, policy: Sequence[Path] | None) -> None:
        """Initialise the weights and the optimizer; see `CriticEngine`."""
        self._kept.clear()
        self._call("initialise", None if policy is None else [str(path) for path in policy])

    def values(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute the value of the state before each trained token; see `CriticEngine`."""
        return list(self._call("values", pack_samples(samples), progress=progress))
