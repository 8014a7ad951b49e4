"""Role `teacher`: log-probs of another model, or of the policy with a hint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from broker.codec import Array
from relax_actors.config import Config
from relax_actors.data.hints import hinted_tokens
from relax_actors.data.model_folder import measure
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.protocols.scoring import Scores, TeacherEngine
from relax_actors.errors import RelaxError, RowError
from relax_actors.messages import Prompt, Trajectory
from relax_actors.messages.teacher import TeacherScores
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.roles.teacher_check import CheckedTeacher
from relax_actors.runtime import Row
from relax_actors.training.samples import in_layout, without_truncated

if TYPE_CHECKING:
    from relax_actors.training.media_preparer import MediaPreparer


@dataclass(frozen=True, slots=True)
class Hinted:
    """A prompt, and what the teacher reads in place of it.

    Attributes:
        before: `[len] int32`, tokens of the prompt.
        after: `[len] int32`, tokens in place of it.
        media_before: media of the prompt; None for a model that reads text only.
        media_after: media in place of them.
    """

    before: Array
    after: Array
    media_before: PromptMedia | None = None
    media_after: PromptMedia | None = None

    @property
    def extra(self) -> int:
        """Number of tokens by which the hint is longer than the prompt."""
        return len(self.after) - len(self.before)


class Teacher(CheckedTeacher):
    """Scores the tokens of trajectories with a teacher; writes `TeacherScores`.

    The teacher is one of four: the model of the folder `model`, which is frozen; one such model for each source of a
    mixture, `models`; an SGLang server at `server`; or, without these, the live policy, which then needs a `hint`
    (self-distillation, arXiv 2601.19897): without it teacher and student would agree.
    """

    writes: ClassVar = "teacher"
    spec: ClassVar = RoleSpec(device=True, start_order=72)
    follows_weights: ClassVar = True

    def inputs(self, config: Config) -> tuple[str, ...]:
        """Return the columns to read: those of every scorer, and with a hint also the prompt."""
        names = super().inputs(config)
        return (*names, "prompt") if self.hint or self.models else names

    def start_engine(self) -> None:
        """Load the teachers, or connect to one."""
        config = self.context.config
        self._frozen: dict[str, TeacherEngine] = {}
        self._top_k = config.algorithm.distil.top_k or 0
        self._tokenizer = Tokenizer(config.model_path) if self.hint else None
        self._preparer: MediaPreparer | None = None
        if self.hint and config.media is not None:
            from relax_actors.training.media_preparer import MediaPreparer  # noqa: PLC0415 most teachers need none

            self._preparer = MediaPreparer(config, self.context.table.store)
        budget = config.trainer.max_tokens_per_microbatch
        folders = self.by_source or {"": config.model_path}
        self._rooms = {name: min(measure(path).context_length, budget) for name, path in folders.items()}
        self._is_live = not self.server and not self.folders
        if self._is_live:
            super().start_engine()
            # Those of torch and Megatron-Core are both; `check_teacher` refuses others.
            self._teacher = cast("TeacherEngine", self._engine)
        elif self.server:
            from relax_actors.engines.sglang.teacher import SglangTeacher  # noqa: PLC0415 only this kind needs HTTP

            key = self.api_key_file.read_text().strip() if self.api_key_file is not None else ""
            self._teacher = SglangTeacher(self.server, key, self.patience, self.context.stopping)
        else:
            from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415 only a process that scores needs torch
            from relax_actors.engines.torch.scorer import TorchTeacher  # noqa: PLC0415

            configure_torch(config.run)
            self._frozen = {name: TorchTeacher(config, path, self.device) for name, path in self.by_source.items()}

    def use_weights(self, newest_sampled: int) -> None:
        """Load the newest ready weights, at least `newest_sampled`, of the live policy."""
        if self._is_live:
            self._stager.use_newest(newest_sampled)

    def trajectory(self, row: Row) -> Trajectory:
        """Return the trajectory of a row without the samples that the trainer leaves out."""
        trajectory = super().trajectory(row)
        if not self.context.config.algorithm.shaping.mask_truncated:
            return trajectory
        kept = without_truncated(trajectory)
        if isinstance(kept, RelaxError):
            raise kept
        return kept

    def samples(self, rows: Sequence[Row]) -> list[TrainSample]:
        """Return the sequences to score, with the hint in place of the prompt."""
        samples = super().samples(rows)
        if not self.hint:
            return samples
        hints = [self._hinted(row) for row in rows]
        return [self._with_prompt(sample, hints[sample.row]) for sample in samples]

    def _problem_of(self, row: Row) -> RelaxError | None:
        """Return why a row cannot be scored: hints lengthen it, contexts may be shorter."""
        problem = super()._problem_of(row)
        if problem is not None:
            return problem
        try:
            self.trajectory(row)
            longer = self._hinted(row).extra if self.hint else 0
        except RelaxError as error:
            return error
        if (source := self.source_of(row)) not in self._rooms:
            return RowError(
                f"the row is of the source {source!r} of [data.mixture], for which roles.teacher.models names no "
                "teacher; add it"
            )
        longest, room = max(row.trajectory.sequence_lengths) + longer, self._rooms[source]
        if longest > room:
            return RowError(
                f"with its hint the teacher reads {longest} tokens in a sequence, more than the {room} of its "
                "context or of trainer.max_tokens_per_microbatch; shorten the hint, or lower rollout.max_tokens"
            )
        return None

    def _score(self, rows: list[Row]) -> list[Any]:
        """Score rows together, those of each teacher on their own."""
        if not self._frozen:
            return super()._score(rows)
        columns: dict[int, Any] = {}
        for source, teacher in self._frozen.items():
            own = [number for number, row in enumerate(rows) if self.source_of(row) == source]
            self._teacher = teacher
            columns |= zip(own, super()._score([rows[number] for number in own]) if own else [], strict=True)
        return [columns[number] for number in range(len(rows))]

    def _hinted(self, row: Row) -> Hinted:
        """Return what the teacher reads in place of a prompt."""
        prompt: Prompt = row.prompt
        tokens = self._hinted_tokens(prompt)
        if self._preparer is None or self._media is None:
            return Hinted(prompt.tokens, tokens)
        try:
            after, media = self._preparer.hinted(prompt, tokens, f"{row.id.kind}/{row.id.step}")
        except RowError as error:
            msg = f"roles.teacher.hint: {error}"
            raise RowError(msg) from error
        return Hinted(row.media.tokens, after, self._media.of(row.media, row.id), media)

    def _hinted_tokens(self, prompt: Prompt) -> Array:
        return prompt.tokens if self._tokenizer is None else hinted_tokens(self._tokenizer, self.hint, prompt)

    def _with_prompt(self, sample: TrainSample, hinted: Hinted) -> TrainSample:
        """Replace a sequence's prompt, unless the sequence does not begin with all of it."""
        start, media = len(hinted.before), sample.media
        if len(sample) < start or not np.array_equal(sample.token_ids[:start], hinted.before):
            return sample
        tokens = np.concatenate([hinted.after, sample.token_ids[start:]]).astype(np.int32)
        mask = np.concatenate([np.zeros(len(hinted.after), np.bool_), sample.loss_mask[start:]])
        if media is not None and hinted.media_before is not None and hinted.media_after is not None:
            media = media.behind(hinted.media_before, hinted.media_after)
        return TrainSample(tokens, mask, media=media, row=sample.row, sample_tokens=sample.sample_tokens)

    def score(self, samples: list[TrainSample]) -> Sequence[Scores]:
        """Score sequences with the teacher."""
        return self._teacher.score_top(samples, self._top_k, self.progress)

    def values(self, trajectories: Sequence[Trajectory], scored: Sequence[Scores]) -> list[TeacherScores]:
        """Return the column of each row from the scores of its sequences."""
        rest = iter(scored)
        return [self._column(trajectory, rest) for trajectory in trajectories]

    def _column(self, trajectory: Trajectory, scored: Iterator[Scores]) -> TeacherScores:
        mask = trajectory.trained
        ends = np.cumsum(trajectory.lengths, dtype=np.int64)
        of_row = list(islice(scored, sum(bool(part.any()) for part in np.split(mask, ends[:-1]))))
        logprobs = in_layout(trajectory, iter(scores.logprobs for scores in of_row))
        if not self._top_k:
            return TeacherScores(logprobs)
        ids = np.concatenate([scores.top_ids for scores in of_row])
        return TeacherScores(logprobs, ids, np.concatenate([scores.top_logprobs for scores in of_row]))

    def metrics(self) -> dict[str, float]:
        """Return the tokens scored by this incarnation, and the version in use of the live policy."""
        return super().metrics() if self._is_live else {"scored_tokens": self._scored_tokens}

    def close(self) -> None:
        """Release the teacher."""
        if self._is_live:
            super().close()
            return
        for teacher in self._frozen.values() or [self._teacher]:
            teacher.close()
