"""Reward `judge`: a language model grades samples, behind any server with the API of OpenAI."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_actors.config.sections import Positive, PositiveFloat
from relax_actors.messages import Prompt
from relax_actors.rewards.judging.answers import CHOOSE, GRADE, read_choice, read_grade
from relax_actors.rewards.judging.calibration import Calibration
from relax_actors.rewards.judging.questions import RUBRIC, Grading, Mode, Question, rubric_of
from relax_actors.rewards.remote.endpoint import Endpoint
from relax_actors.rewards.together import together

SETTING = "reward.options.judge"


@dataclass(kw_only=True, eq=False, repr=False)  # an address may hold a password
class Judge:
    """Reward from 0 to 1 by a language model behind an endpoint.

    A judge that does not answer, or not with a grade, gives no reward: the call is tried again until its deadline. Then
    the actor ends with the reason and its rows wait for the next one; or, if answers came without a grade, the row is
    tried again, and quarantined after `supervision.max_failures`.

    Attributes:
        url: base of the API, such as `http://127.0.0.1:30000/v1`.
        model: its name for the server.
        mode: "rubric" grades each sample; "reference" grades it beside the answer of the row; "pairwise" compares all
            samples of a row with each other, each pair in both orders, and the reward is the share of wins.
        rubric: what counts.
        rubric_file: file with the rubric, instead of `rubric`.
        most: highest grade; the reward is the grade divided by it.
        key_variable: environment variable with the key of the API; list it in `reward.secrets`.
        seconds: for a call with all its tries.
        concurrent: calls at once.
        max_tokens: length of an answer.
        calibration: JSON Lines file of graded examples with the fields `prompt`, `completion`, `score` and, in the mode
            "reference", `answer`. The judge grades them before the first row. Metric `agreement` is the share of pairs
            of examples (of one prompt in the mode "pairwise") that it orders as their scores do; a tie counts half.
        least_agreement: the run ends with an error if the agreement is less.
    """

    deadline = None
    may_hang = True
    not_in_sandbox = "a sandbox has no network"

    url: str
    model: str
    mode: Mode = "rubric"
    rubric: str = RUBRIC
    rubric_file: Path | None = None
    most: Positive = 10
    key_variable: str = ""
    seconds: PositiveFloat = 120.0
    concurrent: Positive = 16
    max_tokens: Positive = 512
    calibration: Path | None = None
    least_agreement: float = 0.0

    def __post_init__(self) -> None:
        url = f"{self.url.rstrip('/')}/chat/completions"
        self._endpoint = Endpoint(url, f"{SETTING}.url", self.key_variable, self.seconds, self.concurrent)
        self._grading = Grading(self.mode, rubric_of(self.rubric, self.rubric_file, f"{SETTING}.rubric_file"))
        self._calibration = None
        if self.calibration is not None:
            self._calibration = Calibration.of_file(self.calibration, self._grading, self.least_agreement, SETTING)
        self._graded: list[float] | None = None
        self._agreement: float | None = None
        self._calibrating = asyncio.Lock()

    def metrics(self) -> dict[str, float]:
        """Agreement with the calibration set, once it is known."""
        return {} if self._agreement is None else {"agreement": self._agreement}

    async def aclose(self) -> None:
        """Close the connections."""
        await self._endpoint.aclose()

    async def __call__(self, completions: list[str], prompt: Prompt) -> list[float]:
        """Return the rewards of the samples of a row.

        Raises:
            ConfigError: wrong address or key, or the judge does not agree with the calibration set.
            RowError: the server refuses a call, or the mode "reference" has no answer to compare with.
            ActorError: the judge gave no answer in time.
            EndpointError: none of its answers has a grade.
        """
        async with self._calibrating:
            if self._calibration is not None and self._agreement is None:
                if self._graded is None:
                    self._graded = await self._answers(self._calibration.questions())
                self._agreement = self._calibration.agreement(self._graded)
        answers = await self._answers(self._grading.questions(completions, prompt))
        return self._grading.rewards(answers, len(completions))

    async def _answers(self, questions: Sequence[Question]) -> list[float]:
        return await together(self._answer(question) for question in questions)

    async def _answer(self, question: Question) -> float:
        compares = self.mode == "pairwise"
        body = {
            "model": self.model,
            "messages": self._grading.messages(question, CHOOSE if compares else GRADE.format(most=self.most)),
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }

        def read(answer: Any) -> float:
            text = _content_of(answer)
            return read_choice(text) if compares else read_grade(text, self.most)

        return await self._endpoint.post(body, read)


def _content_of(answer: Any) -> str:
    match answer:
        case {"choices": [{"finish_reason": "length"}, *_]}:
            msg = "the judge's answer was cut off, so a grade at its end may be one that it quotes; raise max_tokens"
            raise ValueError(msg)
        case {"choices": [{"message": {"content": str(text)}}, *_]}:
            return text
    msg = f"the judge's answer is not a chat completion: {answer!r:.200}"
    raise ValueError(msg)
