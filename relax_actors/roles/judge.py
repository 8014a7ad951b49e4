"""Role `judge`: a language model of its own grades samples, for rewards to read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.backends import frozen_engine
from relax_actors.errors import RelaxError
from relax_actors.messages import FinishReason, Reward
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.rewards.judging import answers
from relax_actors.rewards.judging.questions import Question
from relax_actors.roles.judge_check import SECTION, CheckedJudge
from relax_actors.roles.judge_model import ChoosingModel, JudgeModel, WritingModel
from relax_actors.roles.judge_prompts import choices_of
from relax_actors.roles.reward_columns import kinds_read
from relax_actors.runtime import Row


class Judge(CheckedJudge):
    """Grades samples from 0 to 1 with a frozen model; `{ judge = 0.8 }` in `reward.function`.

    Answers are the most likely ones, or expectations: a row has the same grades in any process. A row that the judge
    cannot grade is tried again, and quarantined after `supervision.max_failures`.
    """

    reads: ClassVar = ("prompt", "trajectory")
    writes: ClassVar = "judge"
    kinds: ClassVar = ("group", "eval")
    batch_wait = 0.003
    spec: ClassVar = RoleSpec(device=True, start_order=73)

    def setup(self) -> None:
        """Load the judge, and measure its agreement with the calibration set.

        Raises:
            ConfigError: the folder has no usable model, or the judge does not agree with the calibration set.
        """
        self._wanted = kinds_read(self.context.config, self.context.role, self)
        tokenizer = Tokenizer(self.model)
        self._prompts = self.prompts(tokenizer)
        self._graded, self._seconds, self._agreement = 0, 0.0, None
        with self.context.device_lock():
            self._model = self._built(tokenizer)
            if (calibration := self.calibrated()) is not None:
                answers = self._asked(calibration.questions())
                for answer in answers:
                    if isinstance(answer, Exception):
                        raise answer
                self._agreement = calibration.agreement([one for one in answers if not isinstance(one, Exception)])

    def _built(self, tokenizer: Tokenizer) -> JudgeModel:
        if self.answer == "reason":
            engine = frozen_engine(self.context, self.backend, f"{SECTION}.backend", self.model, self.device)
            self.context.shares_memory(engine)
            read = answers.read_choice if self.compares else lambda text: answers.read_grade(text, self.most)
            return WritingModel(engine, tokenizer, self.grammar, self.max_tokens, read, self.max_prompts)
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415 needs torch
        from relax_actors.engines.torch.scorer import FrozenScorer  # noqa: PLC0415

        configure_torch(self.context.config.run)
        choices = choices_of(tokenizer, list(self.choices), SECTION)
        scorer = FrozenScorer(self.context.config, self.model, self.device)
        self.context.shares_memory(scorer)
        return ChoosingModel(scorer, choices, list(self.choices.values()), expects=self.answer == "expected")

    def row_limit(self) -> int:
        """Return the maximum number of rows graded at once."""
        return 1 if self.context.config.run.deterministic else self.max_concurrent_rows

    def handle_many(self, rows: Sequence[Row]) -> list[Any]:
        """Grade rows together; a row without a grade gets its error, and the others are graded.

        Rows whose reward does not read the grades get None.
        """
        began = time.monotonic()
        of_rows = [self._questions(row) if row.id.kind in self._wanted else [] for row in rows]
        answers = iter(self._asked([question for part in of_rows if isinstance(part, list) for question in part]))
        results: list[Any] = []
        for row, questions in zip(rows, of_rows, strict=True):
            if isinstance(questions, RelaxError):
                results.append(questions)
                continue
            given = [next(answers) for _ in questions]
            results.append(self._rewards(row, given) if row.id.kind in self._wanted else None)
        self._graded += len(rows)
        self._seconds += time.monotonic() - began
        return results

    def _questions(self, row: Row) -> list[Question] | RelaxError:
        try:
            texts = [row.trajectory.texts[i] for i in _graded(row)]
            return self.grading.questions(texts, row.prompt)
        except RelaxError as error:
            return error

    def _asked(self, questions: Sequence[Question]) -> list[float | Exception]:
        """Ask the judge; a question that cannot be asked has its error as the answer."""
        results: list[Any] = [self._tokens(question) for question in questions]
        good = [n for n, tokens in enumerate(results) if not isinstance(tokens, Exception)]
        if good:
            for n, answer in zip(good, self._model.answers([results[n] for n in good], self.progress), strict=True):
                results[n] = answer
        return results

    def _tokens(self, question: Question) -> Any:
        try:
            return self._prompts.tokens(question)
        except RelaxError as error:
            return error

    def _rewards(self, row: Row, given: Sequence[float | Exception]) -> Reward | Exception:
        """Return the column of a row: 0 for samples that failed, which the reward does not read."""
        if (error := next((one for one in given if isinstance(one, Exception)), None)) is not None:
            return error
        values, graded = np.zeros(len(row.trajectory.texts), np.float32), _graded(row)
        grades = [one for one in given if not isinstance(one, Exception)]
        if graded:
            values[graded] = self.grading.rewards(grades, len(graded))
        return Reward(values)

    def metrics(self) -> dict[str, float]:
        """Return calibration agreement, mean seconds a row, and shortened questions."""
        own = {"seconds": self._seconds / max(1, self._graded), "shortened": float(self._prompts.shortened)}
        return own if self._agreement is None else own | {"agreement": self._agreement}

    def close(self) -> None:
        """Release the judge."""
        self._model.close()


def _graded(row: Row) -> list[int]:
    """Return the indices of the samples that did not fail."""
    return [i for i, reason in enumerate(row.trajectory.finish_reasons) if reason != FinishReason.ERROR]
