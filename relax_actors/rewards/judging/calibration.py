"""Examples with scores that a judge should agree with."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relax_actors.errors import ConfigError
from relax_actors.messages import Prompt
from relax_actors.rewards.judging.questions import Grading, Question


@dataclass(frozen=True, slots=True)
class Example:
    """A completion with the score that it should get, in any unit."""

    prompt: Prompt
    completion: str
    score: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Graded examples, and the least agreement with them.

    Attributes:
        examples: the examples.
        grading: how the judge grades them.
        least: smallest share of pairs of examples that the judge must order as their scores do.
        setting: configuration of the judge, for errors.
    """

    examples: list[Example]
    grading: Grading
    least: float
    setting: str

    @classmethod
    def of_file(cls, file: Path, grading: Grading, least: float, setting: str) -> Calibration:
        """Read examples, one a line; raises ConfigError unless two can be compared."""
        where = f"{setting}.calibration = {str(file)!r}"
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            msg = f"{where} cannot be read: {error}"
            raise ConfigError(msg) from error
        examples = [_example(line, f"{where}, line {i}", grading) for i, line in enumerate(lines, 1) if line.strip()]
        calibration = cls(examples, grading, least, setting)
        if not any(calibration.pairs()):
            of_one = " of one prompt" if grading.mode == "pairwise" else ""
            msg = f"{where} has no two examples{of_one} with different scores; add some"
            raise ConfigError(msg)
        return calibration

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield the indices of examples with different scores, the better one first."""
        for i, k in itertools.combinations(range(len(self.examples)), 2):
            one, other = self.examples[i], self.examples[k]
            of_one = self.grading.mode != "pairwise" or one.prompt.text == other.prompt.text
            if one.score != other.score and of_one:
                yield (i, k) if one.score > other.score else (k, i)

    def questions(self) -> list[Question]:
        """Return what to ask: about each example, or each pair in both orders."""
        if self.grading.mode != "pairwise":
            return [self.grading.single(example.completion, example.prompt) for example in self.examples]
        every = []
        for better, worse in self.pairs():
            one, other = self.examples[better], self.examples[worse]
            every += [
                self.grading.comparison(one.completion, other.completion, one.prompt),
                self.grading.comparison(other.completion, one.completion, one.prompt),
            ]
        return every

    def agreement(self, answers: Sequence[float]) -> float:
        """Return the share of well ordered pairs, a tie half; raises ConfigError below `least`."""
        if self.grading.mode == "pairwise":
            shares = [(there + 1.0 - back) / 2 for there, back in zip(answers[::2], answers[1::2], strict=True)]
        else:
            shares = [(1 + _sign(answers[better] - answers[worse])) / 2 for better, worse in self.pairs()]
        agreement = statistics.fmean(shares)
        if agreement < self.least:
            msg = (
                f"{self.setting}: the judge orders {agreement:.0%} of the pairs of the calibration set as their scores "
                f"do, least_agreement is {self.least:.0%}; choose another model or rubric"
            )
            raise ConfigError(msg)
        return agreement


def _example(line: str, where: str, grading: Grading) -> Example:
    try:
        body = json.loads(line)
        match body:
            case {"prompt": str(text), "completion": str(completion), "score": int() | float() as score} if (
                not isinstance(score, bool) and math.isfinite(score)
            ):
                answer = str(body.get("answer", ""))
                if answer.strip() or grading.mode != "reference":
                    return Example(Prompt(text, np.zeros(1, np.int32), answer, {}, 0, 0), completion, float(score))
    except (ValueError, OverflowError):
        pass
    needed = ' "answer": ...,' if grading.mode == "reference" else ""
    msg = f'{where} is not a valid example; write {{"prompt": ...,{needed} "completion": ..., "score": ...}}'
    raise ConfigError(msg)


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
