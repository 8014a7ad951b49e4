"""Base class of custom rollouts: samples of several turns, written in one method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from relax_actors.data.renderer import Renderer
from relax_actors.engines.protocols import Generation, PromptMedia
from relax_actors.errors import ConfigError, RelaxError, RowError, StoreError
from relax_actors.messages import FinishReason, Sample, Trajectory
from relax_actors.roles.rollout import Rollout
from relax_actors.runtime import More, Results, Row
from relax_actors.runtime.seeds import derive_seed

Generate: TypeAlias = Callable[[Sequence[NDArray[Any]]], list[Generation]]
"""Generates one completion for each of some token sequences `[len] int32`, all in one batch."""


class EpisodeRollout(Rollout):
    """Rollout whose samples are written by `samples`; name a subclass in `rollout.actor`.

    A row is generated alone. Its random numbers follow from the row's seed, the call of `generate` and the place in it,
    so that a row that is generated again after a crash comes out the same. With trainer.router_replay its sequences
    must hold `routed_experts`.
    """

    def samples(self, row: Row, generate: Generate) -> list[Sample]:
        """Return the `group_size(row)` samples of a row, in the role's thread; override it.

        Args:
            row: the row; samples begin with `prompt_tokens(row)`.
            generate: call it with the tokens so far of each sample; it gives one `Generation` for each, without tokens
                where no room is left: a sequence has at most the tokens of the context and of
                trainer.max_tokens_per_microbatch.

        Raises:
            RowError: no samples can be generated; the row is quarantined with the reason. Other exceptions are
                retried, `supervision.max_failures` times in all.
        """
        raise NotImplementedError

    def setup(self) -> None:
        """Build the engine."""
        super().setup()
        # What the trainer takes at once, so that no episode is generated that it would refuse.
        if self._baselines:
            msg = (
                f'algorithm.advantage = "{self.context.config.algorithm.advantage}" needs a greedy sample of each '
                f"prompt, which {type(self).__name__} does not generate; use the built-in rollout, or another advantage"
            )
            raise ConfigError(msg)

    def group_size(self, row: Row) -> int:
        """Samples of a row: `rollout.group_size`; of a held-out row, those of its set of [eval]."""
        return self._sampling(row).samples

    def prompt_tokens(self, row: Row) -> NDArray[Any]:
        """Tokens of a row's prompt as the model reads them, `[prompt_len] int32`."""
        tokens: NDArray[Any] = row.prompt.tokens if self._media is None else row.media.tokens
        return tokens

    def text(self, tokens: NDArray[Any]) -> str:
        """Decode tokens."""
        return self._tokenizer.decode(tokens)

    @cached_property
    def renderer(self) -> Renderer:
        """Renders the messages that reply to the model, for models with a chat template.

        Raises:
            ConfigError: there is no chat template, or it cannot be extended turn by turn.
        """
        return Renderer(self._tokenizer)

    def tokens(self, text: str) -> NDArray[Any]:
        """Encode text without special tokens, `[len] int32`, such as an observation.

        Characters that the tokenizer cannot encode are escaped and counted, as in `Tokenizer.encode_any`.
        """
        return self._tokenizer.encode_any(text, special=False)

    def row_limit(self) -> int:
        """One: `samples` sees a single row."""
        return 1

    def stream(self, rows: Sequence[Row], more: More) -> Iterator[Results]:
        """Generate rows one after the other."""
        del more
        for row in rows:
            yield [(row, self._trajectory_of(row))]

    def _trajectory_of(self, row: Row) -> Trajectory | RelaxError:
        try:
            prompt = self._checked_prompt(row)
            if not prompt.exact_version:
                self._stager.use_newest(prompt.min_version)
            elif not self._stager.try_use_version(prompt.min_version):
                return StoreError(f"weights {prompt.min_version} are no longer in the store")
            if self._media is not None:
                self._media_of[row.id] = self._media.of(row.media, row.id)
            samples = self.samples(row, self._generator(row))
            return self._checked(row, samples)
        except RelaxError as error:
            return error

    def _checked(self, row: Row, samples: list[Sample]) -> Trajectory:
        """Return the row's trajectory; raises RowError if the trainer would refuse it."""
        name, wanted = f"{type(self).__name__}.samples of {row.id}", self.group_size(row)
        prompt = self.prompt_tokens(row)
        if len(samples) != wanted:
            msg = f"{name}: {len(samples)} samples were returned, not {wanted} (`group_size(row)`)"
            raise RowError(msg)
        for i, sample in enumerate(samples):
            if sample.sequences and not np.array_equal(sample.sequences[0].token_ids[: len(prompt)], prompt):
                msg = f"{name}: the first sequence of sample {i} does not begin with `prompt_tokens(row)`"
                raise RowError(msg)
        try:
            trajectory = Trajectory.of(prompt, samples, self._stager.served)
        except ValueError as error:
            msg = f"{name}: {error}"
            raise RowError(msg) from error
        if not row.is_eval and (why := self._validator.of_trajectory(trajectory, row.id.step)):
            msg = f"{name}: {why}"
            raise RowError(msg)
        self._generated_tokens += sum(len(sample.tokens) for sample in samples)
        return trajectory

    def _generator(self, row: Row) -> Generate:
        """Return the function that generates for a row; each call draws from seeds of its own."""
        prompt, calls = row.prompt, 0
        request, start = self._request(row, self._sampling(row)), self.prompt_tokens(row)

        # One object for all sequences that share as much of the prompt: the engine encodes its media once.
        prefix = cache(lambda shared: request.media and request.media.prefix(shared))

        def media_of(tokens: NDArray[Any]) -> PromptMedia | None:
            if self._media is None:
                return None
            shared = count_shared(start, tokens)
            self._media.check_sequence(row.media, tokens, shared)
            media: PromptMedia | None = prefix(shared)
            return media

        version = prompt.min_version if prompt.exact_version else None

        def generate(sequences: Sequence[NDArray[Any]]) -> list[Generation]:
            nonlocal calls
            free = [self._room - len(tokens) for tokens in sequences]
            requests = {
                i: replace(
                    request,
                    tokens=np.asarray(tokens, np.int32),
                    media=media_of(np.asarray(tokens)),
                    seed=derive_seed(prompt.seed, "turn", calls, i),
                    samples=1,
                    max_tokens=min(request.max_tokens, free[i]),
                    min_tokens=min(request.min_tokens, free[i]),
                )
                for i, tokens in enumerate(sequences)
                if free[i] > 0
            }
            calls += 1
            generations = [_nothing() for _ in sequences]
            for i, (generation,) in zip(requests, self._policy.answer(list(requests.values()), version), strict=True):
                generations[i] = generation
            return generations

        return generate


def count_shared(prompt: NDArray[Any], tokens: NDArray[Any]) -> int:
    """Count the leading tokens of a sequence that are those of its prompt."""
    limit = min(len(prompt), len(tokens))
    differences = np.flatnonzero(prompt[:limit] != tokens[:limit])
    return int(differences[0]) if len(differences) else limit


def _nothing() -> Generation:
    return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), FinishReason.LENGTH)
