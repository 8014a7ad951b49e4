"""Role `rollout` with samples of a teacher: `algorithm.distil.student_share` below 1."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from relax_actors.config import Config
from relax_actors.data.hints import hinted_tokens
from relax_actors.engines.backends import frozen_engine
from relax_actors.engines.protocols import GenerationRequest
from relax_actors.engines.protocols.inference import InferenceEngine
from relax_actors.errors import RelaxError, RowError
from relax_actors.generation.batch import Samples
from relax_actors.messages import Trajectory
from relax_actors.roles.rollout import Rollout
from relax_actors.roles.teacher_check import teacher_of
from relax_actors.runtime import More, Results, Row
from relax_actors.runtime.seeds import derive_seed

SEEDS = 1 << 63
"""Number of seeds that `derive_seed` draws from."""


def is_taught(config: Config, step: int, index: int) -> bool:
    """Return whether the teacher samples a training row; the run's seed decides."""
    drawn = derive_seed(config.run.seed, "teacher", step, index) / SEEDS
    return drawn >= config.algorithm.distil.student_share


class TaughtRollout(Rollout):
    """Generates rows, some by a frozen teacher (GKD, arXiv 2306.13649, algorithm 1).

    The teacher is that of [roles.teacher], from its folder or that of the row's source, and reads its hint. Its tokens
    have its own log-probs, and as version the oldest one that may generate the row, without a fingerprint: no version
    of this run sampled them. Held-out rows are always the student's.
    """

    def setup(self) -> None:
        """Build the engines of the policy and of the teacher."""
        super().setup()
        context = self.context
        self._teacher = teacher_of(context.config)
        settings = context.config.rollout
        self._teachers: dict[str, InferenceEngine] = {}
        with context.device_lock():
            for source, folder in self._teacher.by_source.items():
                engine = frozen_engine(context, settings.backend, "rollout.backend", folder, settings.device)
                context.shares_memory(engine)
                self._teachers[source] = engine

    def stream(self, rows: Sequence[Row], more: More) -> Iterator[Results]:
        """Generate the student's rows in continuous batches, then the teacher's."""
        taught: list[Row] = []

        def of_student(arrived: Sequence[Row]) -> list[Row]:
            taught.extend(row for row in arrived if self._is_taught(row))
            return [row for row in arrived if not self._is_taught(row)]

        def joining(limit: int) -> list[Row]:
            # Rows that wait for the teacher take a place, so that other actors get the rest.
            return of_student(more(max(0, min(limit, self.row_limit() - len(taught)))))

        yield from super().stream(of_student(rows), joining)
        while taught:
            batch, taught[:] = taught[: self.row_limit()], taught[self.row_limit() :]
            for source, engine in self._teachers.items():
                yield from self._teach(engine, [row for row in batch if self._teacher.source_of(row) == source])

    def _is_taught(self, row: Row) -> bool:
        return not row.is_eval and is_taught(self.context.config, row.id.step, row.id.index)

    def _teach(self, engine: InferenceEngine, rows: Sequence[Row]) -> Iterator[Results]:
        """Generate rows with a teacher as one batch, and yield each row when it is finished."""
        requests: list[tuple[Row, GenerationRequest]] = []
        bad: list[tuple[Row, RelaxError]] = []
        for row in rows:
            try:
                self._admit(row)
                requests.append((row, self._taught_request(row, engine.context_length)))
            except RelaxError as error:
                bad.append((row, error))
        yield bad
        if not requests:
            return
        began = time.monotonic()
        for done in engine.stream([request for _, request in requests], self.progress):
            seconds = time.monotonic() - began
            yield [(requests[i][0], self._taught(requests[i][0], samples, seconds)) for i, samples in done]

    def _taught_request(self, row: Row, context_length: int) -> GenerationRequest:
        """Return the request for the samples of a row, with the teacher's hint.

        Raises:
            RowError: the hint does not fit the row or the teacher's context.
        """
        request, hint = self._request(row, self._sampling(row)), self._teacher.hint
        tokens = hinted_tokens(self._tokenizer, hint, row.prompt) if hint else request.tokens
        if (room := context_length - len(tokens)) < 1:
            msg = (
                f"the teacher reads a prompt of {len(tokens)} tokens, which leaves no room in its context of "
                f"{context_length}; shorten the prompt or roles.teacher.hint"
            )
            raise RowError(msg)
        return replace(request, tokens=tokens, max_tokens=min(request.max_tokens, room))

    def _taught(self, row: Row, samples: Samples, seconds: float) -> Trajectory:
        version = row.prompt.min_version
        own = [replace(s, versions=np.full(len(s.tokens), version, np.int32)) for s in samples]
        return replace(self._finish(row, own, seconds), fingerprints=[])

    def close(self) -> None:
        """Release the engines."""
        for engine in self._teachers.values():
            engine.close()
        super().close()
