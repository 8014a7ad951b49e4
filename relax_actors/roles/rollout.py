"""Role `rollout`: generates samples, with the version that sampled each token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import ClassVar

import numpy as np

from broker.subjects import RowId
from relax_actors.algorithms.advantages.estimation import needs_greedy
from relax_actors.config import Config
from relax_actors.data.prompt_maker import room
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols import Generation, GenerationRequest, PromptMedia
from relax_actors.errors import RelaxError, RowError
from relax_actors.generation.batch import SERVICE_REQUESTS, Kind, Samples
from relax_actors.generation.policy import Policy
from relax_actors.generation.rows import Rows, SingleTurns, Work
from relax_actors.generation.sampling import Sampling, sampling_of, template_of
from relax_actors.messages import Prompt, Trajectory
from relax_actors.messages.experts import split_prompt_experts
from relax_actors.messages.samples import fingerprints_of
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime import More, Results, Role, Row
from relax_actors.runtime.profiles import request_kind
from relax_actors.sessions.service import GenerationService
from relax_actors.training.row_media import RowMedia, with_media
from relax_actors.training.stops import stops_of
from relax_actors.training.validation import RowValidator

REPORT_INTERVAL = 0.25
"""Least number of seconds between two `generated` metrics, so that short rows do not flood the broker."""
BATCH_WAIT_MIN, BATCH_WAIT_MAX, BATCH_WAIT_SHARE = 0.003, 0.1, 0.01
"""Bounds of `batch_wait` in seconds, and its share of the time that a row takes."""


class Rollout(Role):
    """Generates the samples of rows.

    A training row gets rollout.group_size samples, a held-out row those of its set of [eval]. Where the advantages are
    relative to a greedy sample (ReMax), a training row gets it as one sample more, the last one, none of whose tokens
    are trained.

    Invariant: no sample is generated before the weights are verified. Staged weights are swapped in between batches,
    and within a batch if rollout.in_flight_updates is set.
    """

    reads: ClassVar = ("prompt",)
    writes: ClassVar = "trajectory"
    kinds: ClassVar = ("group", "eval")
    batch_wait = BATCH_WAIT_MIN
    prefetch: ClassVar = False
    spec: ClassVar = RoleSpec(
        device=True,
        may_be_spot=True,
        section="rollout",
        rows="generated",
        requests=("env",),
        serves=("generate", request_kind("rollout")),
        start_order=60,
    )

    def inputs(self, config: Config) -> tuple[str, ...]:
        """Return the columns to read: the prompt, and its media if the model takes media."""
        return with_media(self.reads, config)

    def row_limit(self) -> int:
        """Return the maximum number of rows generated at once."""
        return self.context.config.rollout.max_concurrent_prompts

    def setup(self) -> None:
        """Build the engine, and start to stage published weights in the background."""
        config = self.context.config
        self._settings = config.rollout
        self._tokenizer = Tokenizer(config.model_path)
        self._stop_ids, self._stop_strings = stops_of(self._tokenizer, config.rollout.stop)
        self._policy = Policy(
            self.context, self.progress, most_service=self.most_service_requests(), has_barrier=self.has_barrier()
        )
        self._engine, self._stager = self._policy.engine, self._policy.stager
        self._policy.profiles.start()
        self._room = min(self._engine.context_length, room(config))
        self._validator = RowValidator(config)
        self._media = None if config.media is None else RowMedia(self.context)
        self._baselines = 1 if needs_greedy(config.algorithm) else 0
        # Media of rows that are not being generated yet.
        self._media_of: dict[RowId, PromptMedia] = {}
        self._generated_tokens = 0
        self._last_report = 0.0
        self._service = None if config.gateway is None else self._make_service()
        if self._service is not None:
            self.start_service(self._service)

    def start_service(self, service: GenerationService) -> None:
        """Begin to answer requests of the gateway."""
        service.start()

    def _make_service(self) -> GenerationService:
        config, self._shown = self.context.config, None
        if self._media is not None:
            # `relax check` loads every role, and needs no codecs.
            from relax_actors.sessions.message_media import MessageMedia  # noqa: PLC0415
            from relax_actors.sessions.observation_media import ObservationMedia  # noqa: PLC0415

            self._shown = MessageMedia(ObservationMedia(self.context, self._media))
        return GenerationService(
            self.context,
            self._policy,
            self._tokenizer,
            self._engine.context_length,
            lambda texts: stops_of(self._tokenizer, [*config.rollout.stop, *texts]),
            self._stager.served,
            self._shown,
        )

    def handle_many(self, rows: Sequence[Row]) -> list[Trajectory | RelaxError]:
        """Generate the rows and return all results at once; see `stream` for the errors."""
        results_by_row = dict(pair for results in self.stream(rows, lambda _: ()) for pair in results)
        return [results_by_row[row] for row in rows]

    def stream(self, rows: Sequence[Row], more: More) -> Iterator[Results]:
        """Generate rows in continuous batches, and yield each row when it is finished.

        Rows with the same batch key form a batch. A row with a bad prompt, or whose exact version is gone, yields its
        error and does not delay the other rows.

        Raises:
            RowError: a row requires weights newer than any published version. PromptSource admits a row only after the
                weights that it requires are published, so the row itself is wrong.
            ActorError: the required weights are published but cannot be read.
        """
        self._media_of.clear()  # of rows that an earlier call could not generate
        batches = Rows(self._policy, self.make_work, self._sampling, self._admit, more, self.row_limit(), self.progress)
        yield from batches.generate(rows)
        if self._policy.service_waiting:
            self.context.wake()  # some requests could not join

    def _admit(self, row: Row) -> None:
        """Check a row's prompt and read its media: a lost segment is the row's own error."""
        self._checked_prompt(row)
        if self._media is not None:
            self._media_of[row.id] = self._media.of(row.media, row.id)

    def make_work(self, sampling: Sampling) -> Work:
        """Return the `Work` that turns rows into requests, for one batch key."""

        def generate(row: Row) -> Future[Samples]:
            return self._policy.generate(self._request(row, sampling), Kind.ROW)

        return SingleTurns(generate, self._finish)

    def _finish(self, row: Row, samples: Samples, seconds: float) -> Trajectory:
        self._report(samples, seconds)
        return self._trajectory(row, samples)

    def serve(self, until: Callable[[], bool]) -> None:
        """Answer requests of the gateway while there is no row; see `Role`."""
        self._policy.serve(until)
        if self._policy.service_waiting:
            self.context.wake()

    def has_barrier(self) -> bool:
        """Return whether all conversations' turns form one batch, independent of time."""
        return False

    def most_service_requests(self) -> int:
        """Return the most requests of the gateway that are generated at once."""
        return SERVICE_REQUESTS

    def _checked_prompt(self, row: Row) -> Prompt:
        """Return the prompt of a row, with its media expanded.

        Raises:
            RowError: no samples can be generated from it.
        """
        prompt: Prompt = row.prompt
        if self._media is not None:
            prompt = replace(prompt, tokens=row.media.tokens)
        if why := self._validator.of_prompt(prompt):
            raise RowError(why)
        return prompt

    def _report(self, samples: list[Generation], seconds: float) -> None:
        """Adapt `batch_wait` to the duration of a row; publish the duration every REPORT_INTERVAL."""
        # A row that just misses a batch may wait for all of it: the longer rows take, the longer it pays to wait.
        self.batch_wait = min(BATCH_WAIT_MAX, max(BATCH_WAIT_MIN, BATCH_WAIT_SHARE * seconds))
        now = time.monotonic()
        if now - self._last_report >= REPORT_INTERVAL:
            self._last_report = now
            tokens = sum(len(sample.tokens) for sample in samples)
            self.context.journal.metric({"kind": "generated", "tokens": tokens, "seconds": round(seconds, 5)})

    def _sampling(self, row: Row) -> Sampling:
        """Return how a row is sampled; raises RowError for a row of no set of [eval]."""
        return sampling_of(self.context.config, row.id, self._baselines)

    def _request(self, row: Row, sampling: Sampling) -> GenerationRequest:
        tokens, template = row.prompt.tokens if self._media is None else row.media.tokens, self._template(sampling)
        return replace(
            template,
            tokens=tokens,
            max_tokens=max(1, min(template.max_tokens, self._room - len(tokens))),
            seed=row.prompt.seed,
            media=self._media_of.pop(row.id, None),
        )

    def _template(self, sampling: Sampling) -> GenerationRequest:
        """Return the settings of the requests of rows."""
        return template_of(self.context.config, sampling, self._stop_ids, self._stop_strings)

    def _trajectory(self, row: Row, samples: list[Generation]) -> Trajectory:
        is_trained = not row.is_eval
        prompt_tokens = row.prompt.tokens if self._media is None else row.media.tokens
        self._generated_tokens += sum(len(s.tokens) for s in samples)
        routed = [s.routed_experts for s in samples if s.routed_experts is not None] if is_trained else []
        experts = split_prompt_experts(routed, len(prompt_tokens)) if routed else (None, None)
        versions, mask = np.concatenate([s.versions for s in samples]), None
        entropies = [s.entropies for s in samples if s.entropies is not None]
        baselines = self._baselines if is_trained else 0
        if baselines:
            mask = np.ones(len(versions), np.bool_)
            mask[len(versions) - sum(len(s.tokens) for s in samples[-baselines:]) :] = False
        return Trajectory(
            prompt_tokens=prompt_tokens,
            lengths=np.array([len(s.tokens) for s in samples], np.int32),
            token_ids=np.concatenate([s.tokens for s in samples]),
            logprobs=np.concatenate([s.logprobs for s in samples]),
            versions=versions,
            texts=[self._tokenizer.decode(s.tokens) for s in samples],
            finish_reasons=[s.finish_reason.value for s in samples],
            fingerprints=fingerprints_of(versions, self._stager.served),
            loss_mask=mask,
            greedy_samples=baselines,
            prompt_experts=experts[0],
            routed_experts=experts[1],
            entropies=np.concatenate(entropies) if entropies else None,
        )

    def metrics(self) -> dict[str, float]:
        """Return the tokens generated by this incarnation, the version in use and its swap time.

        Also the characters that it has escaped or dropped because the tokenizer cannot encode them, if there were any.
        """
        version = self._engine.version
        return {
            "generated_tokens": self._generated_tokens,
            "model_cpu_seconds": round(self._policy.model_seconds, 3),
            "version": -1 if version is None else version,
            "swap_seconds": round(self._stager.swap_seconds, 6),
            **({} if self._service is None else self._service.metrics()),
            **self._engine.metrics(),
            **self._tokenizer.replaced,
        }

    def weights_version(self) -> int:
        """Return the version of the newest verified weights; -1 before the first."""
        return self._stager.verified

    def close(self) -> None:
        """Close the stager and the engine."""
        if self._service is not None:
            self._service.close()
        self._policy.close()
