"""Reference and ActorFwd: log-probs of a trajectory's tokens under other weights than those that it was sampled with.

Optional roles: where a run has no [roles.reference] or [roles.actor_fwd], the trainer computes what it needs of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from broker.codec import Array
from relax_actors.config.sections import Named
from relax_actors.engines.backends import scoring_backend
from relax_actors.errors import RelaxError, RowError
from relax_actors.messages import Trajectory
from relax_actors.registry.catalog import SCORING_ENGINES
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime import Role, Row
from relax_actors.training.samples import samples_of
from relax_actors.training.validation import RowValidator
from relax_actors.weights.stager import Stager


class Scorer(Role):
    """Writes `[total] float32`, laid out as `Trajectory.logprobs`, for up to `max_concurrent_rows` rows at once.

    With run.deterministic a row is scored on its own: its numbers are then the same bits whatever else is in flight.
    """

    reads: ClassVar = ("trajectory",)
    batch_wait = 0.003

    device: str = "auto"
    backend: str = "torch"
    """Scoring engine, in the actor's process."""

    follows_weights: ClassVar[bool]
    replays: ClassVar = False
    """Whether it computes with the experts that the rollout recorded, where trainer.router_replay is set."""

    @classmethod
    def options(cls) -> dict[str, tuple[Any, Any]]:
        """As of every role, and `max_concurrent_rows`."""
        own = {
            "max_concurrent_rows": (Annotated[int, Field(gt=0)], 8),
            "backend": (Annotated[str, Named(SCORING_ENGINES)], cls.backend),
        }
        return super().options() | own

    def row_limit(self) -> int:
        """Rows scored at once."""
        return 1 if self.context.config.run.deterministic else self.max_concurrent_rows

    def setup(self) -> None:
        """Build the engine; its weights come when they are published."""
        backend = scoring_backend(self.backend, f"roles.{self.context.role}.backend")
        self._engine = backend.build(self.context, self.device, follows=self.follows_weights)
        self._stager = Stager(self.context, self._engine, follows=self.follows_weights)
        self._stager.start()
        self._validator = RowValidator(self.context.config)
        self._tokens = 0
        self._model_seconds = 0.0

    def use_weights(self, least: int) -> None:
        """Have the engine serve what tokens are to be scored with of which version `least` wrote the newest."""
        raise NotImplementedError

    def handle_many(self, rows: Sequence[Row]) -> list[Array | RelaxError]:
        """Score rows together; one that is bad gets its error and does not hold up its neighbours."""
        found: list[Array | RelaxError | None] = [self._refusal(row) for row in rows]
        good = [n for n, refused in enumerate(found) if refused is None]
        for n, logprobs in zip(good, self._score([rows[n] for n in good]) if good else [], strict=True):
            found[n] = logprobs
        return [value for value in found if value is not None]

    def _refusal(self, row: Row) -> RelaxError | None:
        try:
            why = self._validator.of_trajectory(row.trajectory, row.id.step)
        except RelaxError as error:
            return error
        return RowError(why) if why else None

    def _score(self, rows: list[Row]) -> list[Array]:
        trajectories: list[Trajectory] = [row.trajectory for row in rows]
        self.use_weights(max(int(t.versions.max()) for t in trajectories))
        began = time.thread_time()
        replays = self.replays and self.context.config.trainer.router_replay
        samples = [s for i, t in enumerate(trajectories) for s in samples_of(i, t, replays=replays)]
        scored = iter(self._engine.score(samples, self.progress))
        self._model_seconds += time.thread_time() - began
        self._tokens += sum(sample.trained for sample in samples)
        return [_own_tokens(trajectory, scored) for trajectory in trajectories]

    def metrics(self) -> dict[str, float]:
        """Tokens scored in this life, and the version in use."""
        version = self._engine.version
        return {
            "scored_tokens": self._tokens,
            "model_cpu_seconds": round(self._model_seconds, 3),
            "version": -1 if version is None else version,
        }

    def close(self) -> None:
        """Close the engine."""
        self._stager.close()
        self._engine.close()


def _own_tokens(trajectory: Trajectory, scored: Iterator[Array]) -> Array:
    """Log-probs of a row as its trajectory lays tokens out, `[total] float32`, from those of its trained sequences."""
    found = np.zeros(len(trajectory.token_ids), np.float32)
    begin = 0
    for own in trajectory.lengths.tolist():
        part = slice(begin, begin + own)
        if trajectory.trained[part].any():
            found[part] = next(scored)[-own:]
        begin += own
    return found


class Reference(Scorer):
    """Log-probs of the model at the start of the run, version 0, for the KL."""

    writes: ClassVar = "reference"
    spec: ClassVar = RoleSpec(device=True, start_order=70)
    follows_weights: ClassVar = False

    def use_weights(self, least: int) -> None:  # noqa: ARG002 whatever was trained since
        """Version 0."""
        self._stager.use_version(0)


class ActorFwd(Scorer):
    """Log-probs of the newest weights when the row comes, for the proximal policy: never older than its tokens'.

    On-policy, with staleness.max = 0, they are those of the very step that trains the row.
    """

    writes: ClassVar = "actor_fwd"
    spec: ClassVar = RoleSpec(device=True, start_order=71)
    follows_weights: ClassVar = True
    replays: ClassVar = True

    def use_weights(self, least: int) -> None:
        """The newest that are ready."""
        self._stager.use_newest(least)
