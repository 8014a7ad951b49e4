"""Base class of roles that compute log-probs of trajectories under a chosen weight version.

Such roles are optional. In a run without [roles.reference] or [roles.actor_fwd] the trainer computes the log-probs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from broker.codec import Array
from relax_actors.config.sections import Named
from relax_actors.engines.backends import scoring_backend
from relax_actors.engines.protocols import TrainSample
from relax_actors.errors import RelaxError, RowError
from relax_actors.messages import Trajectory
from relax_actors.registry.catalog import SCORING_ENGINES
from relax_actors.runtime import Role, Row
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

    def row_limit(self) -> int:
        """Return the maximum number of rows scored at once."""
        return 1 if self.context.config.run.deterministic else self.max_concurrent_rows

    def setup(self) -> None:
        """Build the engine, and start to stage published weights in the background."""
        backend = scoring_backend(self.backend, f"roles.{self.context.role}.backend")
        self._engine = backend.build(self.context, self.device, follows=self.follows_weights)
        self._stager = Stager(self.context, self._engine, follows=self.follows_weights)
        self._stager.start()
        self._validator = RowValidator(self.context.config)
        self._scored_tokens = 0
        self._model_seconds = 0.0

    def use_weights(self, newest_sampled: int) -> None:
        """Load the weights to score with into the engine.

        Args:
            newest_sampled: newest version that sampled a token of the rows.
        """
        raise NotImplementedError

    def handle_many(self, rows: Sequence[Row]) -> list[Array | RelaxError]:
        """Score rows together; a malformed row gets its error, and the others are scored."""
        found: list[Array | RelaxError | None] = [self._problem_of(row) for row in rows]
        good = [n for n, problem in enumerate(found) if problem is None]
        for n, logprobs in zip(good, self._score([rows[n] for n in good]) if good else [], strict=True):
            found[n] = logprobs
        return [value for value in found if value is not None]

    def _problem_of(self, row: Row) -> RelaxError | None:
        try:
            why = self._validator.of_trajectory(row.trajectory, row.id.step)
        except RelaxError as error:
            return error
        return RowError(why) if why else None

    def _score(self, rows: list[Row]) -> list[Array]:
        trajectories: list[Trajectory] = [row.trajectory for row in rows]
        self.use_weights(max(int(t.versions.max()) for t in trajectories))
        cpu_start = time.thread_time()
        replays = self.replays and self.context.config.trainer.router_replay
        samples = [s for i, t in enumerate(trajectories) for s in samples_of(i, t, replays=replays)]
        scored = iter(self._compute(samples))
        self._model_seconds += time.thread_time() - cpu_start
        self._scored_tokens += sum(sample.trained for sample in samples)
        return [in_layout(trajectory, scored) for trajectory in trajectories]

    def _compute(self, samples: Sequence[TrainSample]) -> Sequence[Array]:
        """Compute the numbers of each sequence with trained tokens, `[len] float32`."""
        return self._engine.score(samples, self.progress)

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
