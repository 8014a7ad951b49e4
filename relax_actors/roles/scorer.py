"""Base class of roles that compute log-probs of trajectories under a chosen weight version.

Such roles are optional. In a run without [roles.reference] or [roles.actor_fwd] the trainer computes the log-probs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from broker.codec import Array
from relax_actors.algorithms.schedules import reference_version
from relax_actors.config import Config
from relax_actors.config.sections import Named
from relax_actors.data.checked_run import CheckedRun
from relax_actors.engines.backends import check_adapters, scoring_backend
from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.protocols.scoring import SupportsSquares
from relax_actors.errors import ConfigError, RelaxError, RowError
from relax_actors.messages import Trajectory
from relax_actors.registry.catalog import SCORING_ENGINES
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime import Role, Row
from relax_actors.training.row_media import RowMedia, with_media
from relax_actors.training.samples import in_layout, samples_of
from relax_actors.training.validation import RowValidator
from relax_actors.weights.stager import Stager


class Scorer(Role):
    """Computes log-probs of the tokens of trajectories.

    The column is `[total] float32` in the layout of `Trajectory.logprobs`. Up to `max_concurrent_rows` rows are scored
    at once. With run.deterministic each row is scored on its own, so that its bits do not depend on the other rows that
    are ready.
    """

    reads: ClassVar = ("trajectory",)
    batch_wait = 0.003

    device: str = "auto"
    backend: str = "torch"
    """Name or dotted path of the scoring engine, which runs in the actor's process."""

    follows_weights: ClassVar[bool]
    """Whether the stager prepares every newly published version."""
    replays: ClassVar = False
    """Whether to compute with the experts that the rollout recorded, if trainer.router_replay is set."""

    @classmethod
    def options(cls) -> dict[str, tuple[Any, Any]]:
        """Return the options of every role, and `max_concurrent_rows` and `backend`."""
        own = {
            "max_concurrent_rows": (Annotated[int, Field(gt=0)], 8),
            "backend": (Annotated[str, Named(SCORING_ENGINES)], cls.backend),
        }
        return super().options() | own

    def check(self, run: CheckedRun) -> Iterator[str]:
        """Check the scoring engine with the model."""
        if run.model is not None:
            setting = f"roles.{run.role}.backend"
            backend = scoring_backend(self.backend, setting)
            check_adapters(run.config, backend, setting, self.backend)
            yield from backend.check(run.config, run.model.folder, setting)

    def inputs(self, config: Config) -> tuple[str, ...]:
        """Return the columns to read: trajectory, and media if the model takes them."""
        return with_media(self.reads, config)

    def row_limit(self) -> int:
        """Return the maximum number of rows scored at once."""
        return 1 if self.context.config.run.deterministic else self.max_concurrent_rows

    def setup(self) -> None:
        """Build the engine, and start to stage published weights in the background."""
        self._validator = RowValidator(self.context.config)
        self._media = None if self.context.config.media is None else RowMedia(self.context)
        self._scored_tokens = 0
        self._model_seconds = 0.0
        self.start_engine()

    def start_engine(self) -> None:
        """Build the engine of published weights and its stager."""
        backend = scoring_backend(self.backend, f"roles.{self.context.role}.backend")
        with self.context.device_lock():
            self._engine = backend.build(self.context, self.device, follows=self.follows_weights)
            self.context.shares_memory(self._engine)
        self._stager = Stager(self.context, self._engine, follows=self.follows_weights)
        self._stager.start()

    def use_weights(self, newest_sampled: int) -> None:
        """Load the weights to score with into the engine.

        Args:
            newest_sampled: newest version that sampled a token of the rows.
        """
        raise NotImplementedError

    def handle_many(self, rows: Sequence[Row]) -> list[Any]:
        """Score rows together; a malformed row gets its error, and the others are scored."""
        results: list[Any] = [self._problem_of(row) for row in rows]
        good = [n for n, problem in enumerate(results) if problem is None]
        for n, value in zip(good, self._score([rows[n] for n in good]) if good else [], strict=True):
            results[n] = value
        return results

    def _problem_of(self, row: Row) -> RelaxError | None:
        try:
            why = self._validator.of_trajectory(row.trajectory, row.id.step)
        except RelaxError as error:
            return error
        return RowError(why) if why else None

    def _score(self, rows: list[Row]) -> list[Any]:
        trajectories = [self.trajectory(row) for row in rows]
        self.use_weights(max(int(t.versions.max()) for t in trajectories))
        cpu_start = time.thread_time()
        samples = self.samples(rows)
        scored = self.score(samples)
        self._model_seconds += time.thread_time() - cpu_start
        self._scored_tokens += sum(sample.trained for sample in samples)
        return self.values(trajectories, scored)

    def samples(self, rows: Sequence[Row]) -> list[TrainSample]:
        """Return the sequences to score, of all rows in order."""
        replays, samples = self.replays and self.context.config.trainer.router_replay, []
        for i, row in enumerate(rows):
            samples += samples_of(i, self.trajectory(row), replays=replays, media=self._media_of(row))
        return samples

    def _media_of(self, row: Row) -> list[PromptMedia] | None:
        return None if self._media is None else self._media.of_row(row)

    def trajectory(self, row: Row) -> Trajectory:
        """Return the trajectory of a row whose trained tokens are scored."""
        trajectory: Trajectory = row.trajectory
        return trajectory

    def score(self, samples: list[TrainSample]) -> Sequence[Any]:
        """Score sequences with the weights in use."""
        return self._engine.score(samples, self.progress)

    def values(self, trajectories: Sequence[Trajectory], scored: Sequence[Any]) -> list[Any]:
        """Return the value of each row's column from the scores of its sequences."""
        rest = iter(scored)
        return [in_layout(trajectory, rest) for trajectory in trajectories]

    def metrics(self) -> dict[str, float]:
        """Return the tokens scored by this incarnation, and the version in use."""
        version = self._engine.version
        return {
            "scored_tokens": self._scored_tokens,
            "model_cpu_seconds": round(self._model_seconds, 3),
            "version": -1 if version is None else version,
        }

    def close(self) -> None:
        """Close the stager and the engine."""
        self._stager.close()
        self._engine.close()


class ActorFwd(Scorer):
    """Scores trajectories with the newest weights that are ready when the row arrives.

    They are never older than the weights that sampled the row's newest token. On-policy, with staleness.max = 0, they
    are exactly the weights that the row's step starts from.
    """

    writes: ClassVar = "actor_fwd"
    spec: ClassVar = RoleSpec(device=True, start_order=71, needs_weights="it needs old weights")
    follows_weights: ClassVar = True
    replays: ClassVar = True

    def use_weights(self, newest_sampled: int) -> None:
        """Load the newest weights that are ready, at least `newest_sampled`."""
        self._stager.use_newest(newest_sampled)


class Squares(ActorFwd):
    """Computes sums of squared probabilities of the vocabulary at each token.

    The column is `[total] float32` in the layout of `Trajectory.logprobs`. The weights are chosen as by `ActorFwd`.
    """

    writes: ClassVar = "squares"
    spec: ClassVar = RoleSpec(device=True, start_order=72, needs_weights="it needs old weights")

    def setup(self) -> None:
        """Build the engine; raises ConfigError if it computes no squared probabilities."""
        super().setup()
        if not isinstance(self._engine, SupportsSquares):
            msg = (
                f'roles.{self.context.role}.backend = "{self.backend}" computes no squared probabilities; set "torch" '
                'or "megatron"'
            )
            raise ConfigError(msg)

    def score(self, samples: list[TrainSample]) -> Sequence[Array]:
        """Compute sums of squared probabilities with the weights in use."""
        assert isinstance(self._engine, SupportsSquares)  # noqa: S101 checked in `setup`
        return self._engine.squares(samples, self.progress)


class Reference(Scorer):
    """Scores trajectories with version 0, or that of `algorithm.reference_every`."""

    writes: ClassVar = "reference"
    spec: ClassVar = RoleSpec(device=True, start_order=70, needs_weights="it needs weights 0")
    follows_weights: ClassVar = False

    def setup(self) -> None:
        """Build the engine."""
        super().setup()
        self._scoring_version = 0

    def use_weights(self, newest_sampled: int) -> None:  # noqa: ARG002 the step decides
        """Load the version of the rows that are scored next."""
        self._stager.use_version(self._scoring_version)

    def _score(self, rows: list[Row]) -> list[Any]:
        """Score rows together that have the same version, older versions first."""
        versions = [reference_version(self.context.config, row.id.step) for row in rows]
        values: dict[int, Any] = {}
        for version in sorted(set(versions)):
            self._scoring_version = version
            places = [n for n, own in enumerate(versions) if own == version]
            values |= zip(places, super()._score([rows[n] for n in places]), strict=True)
        return [values[n] for n in range(len(rows))]
