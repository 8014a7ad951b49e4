"""Options of the role `judge`, and their check before a run starts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from relax_actors.config import Config
from relax_actors.config.sections import Named, Positive
from relax_actors.data.checked_run import CheckedRun
from relax_actors.data.grammar import Grammars
from relax_actors.data.model_folder import measure
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.backends import check_frozen, refuse_shared_device
from relax_actors.engines.torch.architectures import check_architecture
from relax_actors.errors import ConfigError, RowError
from relax_actors.media.family import family_of
from relax_actors.registry.catalog import INFERENCE_ENGINES
from relax_actors.rewards.judging import answers
from relax_actors.rewards.judging.calibration import Calibration
from relax_actors.rewards.judging.questions import RESPONSES, RUBRIC, Grading, Mode, rubric_of
from relax_actors.roles.judge_prompts import JudgePrompts, check_template, choices_of
from relax_actors.runtime import Role

SECTION = "roles.judge"
BESIDE_REASON = 32
"""Tokens of an answer besides its reason, in characters."""
SHORTEST_REASON = 16
"""Characters that a reason has room for at least."""
SAMPLE = '{"reason": "ABCabc", "score": 0123456789, "better": "equal"}'
"""Characters that a model must be able to write."""


class CheckedJudge(Role):
    """Options of a judge, and their check."""

    model: Path
    """Model folder of the judge, with weights and tokenizer. It does not change."""
    answer: Literal["expected", "choice", "reason"] = "expected"
    """How the judge answers: "expected" is the mean of all grades, weighted by their probabilities; "choice" the most
    likely grade; "reason" a reason and a grade, which the judge writes in a grammar (needs llguidance)."""
    mode: Mode = "rubric"
    """What the judge grades; see `relax_actors.rewards.judging.questions`."""
    rubric: str = RUBRIC
    """What counts."""
    rubric_file: Path | None = None
    """File with the rubric, instead of `rubric`."""
    most: Positive = 9
    """Highest grade; the reward is the grade divided by it."""
    template: str = ""
    """Text that the judge reads in place of a chat, such as '"{prompt}" "{response}" '. A quote or a line break follows
    each name."""
    calibration: Path | None = None
    """JSON Lines file of graded examples, which the judge grades before its first row."""
    least_agreement: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The run ends with an error if the judge orders less than this share of pairs of examples as their scores do."""
    max_tokens: Positive = 256
    """Tokens of an answer with a reason."""
    max_prompts: Positive = 32
    """Prompts that the judge writes answers to at once."""
    backend: Annotated[str, Named(INFERENCE_ENGINES)] = "transformers"
    """Inference engine that writes answers with a reason; "sglang" starts a server for each actor of the judge."""
    device: str = "auto"
    """Torch device."""

    @classmethod
    def options(cls) -> dict[str, tuple[Any, Any]]:
        """Return the options of the class, and `max_concurrent_rows`."""
        return super().options() | {"max_concurrent_rows": (Annotated[int, Field(gt=0)], 8)}

    @cached_property
    def grading(self) -> Grading:
        """How samples are graded; raises ConfigError if the file of the rubric cannot be read."""
        return Grading(self.mode, rubric_of(self.rubric, self.rubric_file, f"{SECTION}.rubric_file"))

    @property
    def compares(self) -> bool:
        """Whether the judge compares pairs of samples."""
        return self.mode == "pairwise"

    @property
    def choices(self) -> dict[str, float]:
        """Answers among which the judge chooses, with their values from 0 to 1."""
        if self.compares:
            return {"A": 1.0, "B": 0.0}
        return {str(grade): grade / self.most for grade in range(self.most + 1)}

    @property
    def grammar(self) -> str:
        """Grammar of an answer with a reason, which ends within `max_tokens`."""
        schema = {"enum": list(answers.SHARES)} if self.compares else {"enum": list(range(self.most + 1))}
        return answers.grammar({"better" if self.compares else "score": schema}, self.max_tokens - BESIDE_REASON)

    def prompts(self, tokenizer: Tokenizer) -> JudgePrompts:
        """Return the writer of the judge's prompts."""
        if self.answer == "reason":
            how, length = answers.CHOOSE if self.compares else answers.GRADE.format(most=self.most), self.max_tokens
        else:
            how = answers.CHOOSE_ALONE if self.compares else answers.GRADE_ALONE.format(most=self.most)
            length = max(map(len, choices_of(tokenizer, list(self.choices), SECTION)))
        room = measure(self.model, setting=f"{SECTION}.model").context_length - length
        return JudgePrompts(tokenizer, self.grading, how, self.template, room)

    def calibrated(self) -> Calibration | None:
        """Return the calibration set; None without one; errors as `Calibration.of_file`."""
        if self.calibration is None:
            return None
        return Calibration.of_file(self.calibration, self.grading, self.least_agreement, SECTION)

    def check(self, run: CheckedRun) -> Iterator[str]:
        """Check model, form of question and answer, calibration set, and room for a response."""
        config = run.config
        if self.template:
            check_template(self.template, self.grading, f"{SECTION}.template")
        tokenizer = self._check_model(config)
        if self.calibrated() is None and self.least_agreement:
            msg = f"{SECTION}.least_agreement = {self.least_agreement} has no effect without calibration; set it"
            raise ConfigError(msg)
        if not self.template and not tokenizer.has_chat_template:
            msg = f"{SECTION}.model {self.model} has no chat template; write {SECTION}.template"
            raise ConfigError(msg)
        if self.answer == "reason":
            if self.backend == "sglang":
                refuse_shared_device(config, "judge", f'{SECTION}.backend = "sglang"')
            yield from check_frozen(config, self.backend, f"{SECTION}.backend", self.model)
            self._check_writes(tokenizer)
        facts = measure(self.model, setting=f"{SECTION}.model")
        yield f"the judge has {facts.parameters / 1e6:.2f} M parameters and a context of {facts.context_length} tokens"
        yield from self._check_room(tokenizer, config.rollout.max_tokens)

    def _check_room(self, tokenizer: Tokenizer, max_tokens: int) -> Iterator[str]:
        """Check that a question fits the context; note if a long response does not."""
        writer = self.prompts(tokenizer)
        empty = dict.fromkeys(self.grading.names, "")
        try:
            writer.tokens(empty)
            writer.tokens(empty | {name: "0" * max_tokens for name in RESPONSES if name in empty})
        except RowError as error:
            msg = f"{SECTION}.model {self.model}: {error}"
            raise ConfigError(msg) from error
        if writer.shortened:
            yield (
                f"{SECTION}.model: a response of rollout.max_tokens = {max_tokens} characters does not fit its "
                "context; such responses are cut in their middle"
            )

    def _check_model(self, config: Config) -> Tokenizer:
        """Check that the folder holds a model of text with weights; return its tokenizer."""
        where = f"{SECTION}.model"
        if not any(self.model.glob("*.safetensors")):
            why = "has no *.safetensors" if self.model.is_dir() else "does not exist"
            msg = f"{where} {self.model} {why}; name the folder of a trained model, such as runs/judge/model"
            raise ConfigError(msg)
        measure(self.model, setting=where)
        check_architecture(config, self.model)
        if config.media is not None or family_of(self.model) is not None:
            msg = f"{where}: a judge reads text only; judge media by an endpoint of your own with the reward remote"
            raise ConfigError(msg)
        return Tokenizer(self.model)

    def _check_writes(self, tokenizer: Tokenizer) -> None:
        """Check that the judge can write a reason and a grade."""
        if self.max_tokens < BESIDE_REASON + SHORTEST_REASON:
            least = BESIDE_REASON + SHORTEST_REASON
            msg = f"{SECTION}.max_tokens = {self.max_tokens} has no room for a reason; set it to {least} or more"
            raise ConfigError(msg)
        try:
            tokenizer.encode(SAMPLE, special=False)
            Grammars(tokenizer).begin(self.grammar)
        except RowError as error:
            msg = f'{SECTION}.answer = "reason": the judge\'s model cannot write it: {error}; use "expected"'
            raise ConfigError(msg) from error
