"""Rollout: generates the samples of a row with the newest weights, and says which version wrote each token."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, ClassVar, TypeAlias

import numpy as np

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.backends import inference_backend
from relax_actors.engines.protocols import Generation, GenerationRequest
from relax_actors.errors import ConfigError, RelaxError, RowError, StoreError
from relax_actors.messages import Prompt, Trajectory
from relax_actors.messages.experts import split_prompt_experts
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime import More, Results, Role, Row
from relax_actors.training.validation import RowValidator
from relax_actors.weights.stager import Stager

TELL_SECONDS = 0.25
Kind: TypeAlias = tuple[int | None, bool]
"""What rows that are generated together have in common: the one version that they ask for, if any; greedy or not."""
Waiting: TypeAlias = defaultdict[Kind, list[Row]]
BATCH_WAIT_LEAST, BATCH_WAIT_MOST, BATCH_WAIT_SHARE = 0.003, 0.1, 0.01


class Rollout(Role):
    """Serves nothing before its weights are verified; swaps, between batches, to what was prepared meanwhile."""

    reads: ClassVar = ("prompt",)
    writes: ClassVar = "trajectory"
    kinds: ClassVar = ("group", "eval")
    batch_wait = BATCH_WAIT_LEAST
    prefetch: ClassVar = False
    spec: ClassVar = RoleSpec(device=True, section="rollout", start_order=60)

    def row_limit(self) -> int:
        """Prompts generated at once, at most."""
        return self.context.config.rollout.max_concurrent_prompts

    def setup(self) -> None:
        """Build the engine; its weights come as soon as they are published."""
        config = self.context.config
        self._settings = config.rollout
        self._tokenizer = Tokenizer(config.model_path)
        self._stops = self._tokenizer.stop_ids | {stop_id(self._tokenizer, text) for text in config.rollout.stop}
        self._engine = inference_backend(config).build(self.context)
        self._stager = Stager(self.context, self._engine)
        self._stager.start()
        self._validator = RowValidator(config)
        self._in_flight = config.updates_in_flight
        self._tokens = 0
        self._model_seconds = 0.0
        self._told = 0.0

    def handle_many(self, rows: Sequence[Row]) -> list[Trajectory | RelaxError]:
        """Generate rows, and give all at the end; see `stream`."""
        found = dict(pair for results in self.stream(rows, lambda _: ()) for pair in results)
        return [found[row] for row in rows]

    def stream(self, rows: Sequence[Row], more: More) -> Iterator[Results]:
        """Generate rows together; those that ask for one version of the weights are generated with just that.

        A row whose prompt is bad, or whose version is gone, gets its error and does not hold up its neighbours.

        Raises:
            RowError: weights as new as a row demands were never published; rows are admitted after them.
            ActorError: they are published but cannot be had.
        """
        waiting: Waiting = defaultdict(list)
        yield self._sort(rows, waiting)
        while waiting:
            yield from self._generate(next(iter(waiting)), waiting, more)

    def _sort(self, rows: Sequence[Row], waiting: Waiting) -> list[tuple[Row, RelaxError]]:
        """Put rows to those that may be generated together; gives those that cannot be generated."""
        bad = []
        for row in rows:
            try:
                prompt = self._prompt(row)
            except RelaxError as error:
                bad.append((row, error))
                continue
            waiting[prompt.min_version if prompt.exact_version else None, prompt.greedy].append(row)
        return bad

    def _generate(self, kind: Kind, waiting: Waiting, more: More) -> Iterator[Results]:
        """Generate the rows of a kind, and those that come meanwhile: until others wait, or newer weights."""
        first, (version, greedy) = waiting.pop(kind), kind
        if version is None:
            self._stager.use_newest(max(row.prompt.min_version for row in first))
        elif not self._stager.try_use_version(version):
            yield [(row, StoreError(f"weights {version} are gone")) for row in first]
            return
        refresh = self._stager.refresh if version is None and self._in_flight else None
        # Rows by the order in which they came, each with the time when it began.
        running: dict[int, tuple[Row, float]] = {}
        numbers = count()
        bad: list[tuple[Row, RelaxError]] = []

        def begin(rows: Sequence[Row]) -> list[GenerationRequest]:
            now = time.monotonic()
            running.update((next(numbers), (row, now)) for row in rows)
            return [self._request(row.prompt, greedy=greedy) for row in rows]

        def joining(most: int) -> list[GenerationRequest]:
            drains = refresh is None and (waiting or self._stager.has_newer)
            if version is not None or drains or any(other != kind for other in waiting):
                return []
            if not waiting:
                bad.extend(self._sort(more(most), waiting))
            serving = self._stager.serving
            newest, here = -1 if serving is None else serving.version, waiting.pop(kind, [])
            if late := [row for row in here if row.prompt.min_version > newest]:
                waiting[kind] = late
            return begin([row for row in here if row.prompt.min_version <= newest])

        at = time.thread_time()
        for done in self._engine.stream(begin(first), self.progress, refresh, joining):
            self._model_seconds += time.thread_time() - at
            found: list[tuple[Row, Any]] = []
            for i, samples in done:
                row, began = running.pop(i)
                self._tell(samples, time.monotonic() - began)
                found.append((row, self._trajectory(row, samples)))
            yield [*found, *bad]
            bad.clear()
            at = time.thread_time()
        yield bad

    def _prompt(self, row: Row) -> Prompt:
        prompt: Prompt = row.prompt
        if why := self._validator.of_prompt(prompt):
            raise RowError(why)
        return prompt

    def _tell(self, samples: list[Generation], seconds: float) -> None:
        """Publish how long a row took; of quick ones only some."""
        # Rows that come a moment later would wait for the whole batch: the longer that takes, the longer they may be.
        self.batch_wait = min(BATCH_WAIT_MOST, max(BATCH_WAIT_LEAST, BATCH_WAIT_SHARE * seconds))
        now = time.monotonic()
        if now - self._told >= TELL_SECONDS:
            self._told = now
            tokens = sum(len(sample.tokens) for sample in samples)
            self.context.journal.metric({"kind": "generated", "tokens": tokens, "seconds": round(seconds, 5)})

    def _request(self, prompt: Prompt, *, greedy: bool) -> GenerationRequest:
        settings = self._settings
        return GenerationRequest(
            tokens=prompt.tokens,
            seed=prompt.seed,
            samples=1 if greedy else settings.group_size,
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_tokens,
            stop_ids=self._stops,
            greedy=greedy,
            min_tokens=settings.min_tokens,
        )

    def _trajectory(self, row: Row, samples: list[Generation]) -> Trajectory:
        prompt, is_trained = row.prompt, not row.is_eval
        self._tokens += sum(len(s.tokens) for s in samples)
        routed = [s.routed_experts for s in samples if s.routed_experts is not None] if is_trained else []
        experts = split_prompt_experts(routed, len(prompt.tokens)) if routed else (None, None)
        return Trajectory(
            prompt_tokens=prompt.tokens,
            lengths=np.array([len(s.tokens) for s in samples], np.int32),
            token_ids=np.concatenate([s.tokens for s in samples]),
            logprobs=np.concatenate([s.logprobs for s in samples]),
            versions=np.concatenate([s.versions for s in samples]),
            texts=[self._tokenizer.decode(s.tokens) for s in samples],
            finish_reasons=[s.finish_reason.value for s in samples],
            fingerprint=self._stager.serving.fingerprint if self._stager.serving else "",
            prompt_experts=experts[0],
            routed_experts=experts[1],
        )

    def metrics(self) -> dict[str, float]:
        """Tokens generated in this life, and the version in use."""
        version = self._engine.version
        return {
            "generated_tokens": self._tokens,
            "model_cpu_seconds": round(self._model_seconds, 3),
            "version": -1 if version is None else version,
            "swap_seconds": round(self._stager.swap_seconds, 6),
            "weights_from_memory": self._stager.received_from_memory,
        }

    def close(self) -> None:
        """Close the engine."""
        self._stager.close()
        self._engine.close()


def stop_id(tokenizer: Tokenizer, text: str) -> int:
    """The token id of a stop string.

    Raises:
        ConfigError: it is not a single token.
    """
    found = tokenizer.token_id(text)
    if found is None:
        msg = f"rollout.stop {text!r} is not a single token of this model; use one that is"
        raise ConfigError(msg)
    return found
