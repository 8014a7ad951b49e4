"""Tokens of sampled answers for a reward model, by its own tokenizer and template.

Special tokens that answers and messages spell as text are broken (see `PlainTexts`): no text can choose where its score
is read, or add a message. A prompt that is no chat is read as it is, since the template of its run may write special
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.config.pools import ExamplesSection
from relax_actors.data.answer_tokens import ASSISTANT, AnswerTokens
from relax_actors.data.escapes import PlainTexts
from relax_actors.data.example import Example
from relax_actors.data.prompt_maker import MAX_SECONDS
from relax_actors.data.score_folder import ScoreFolder
from relax_actors.data.targets import at_end, steps_of
from relax_actors.data.time_limit import call_within
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RowError, SlowRowError
from relax_actors.messages import Prompt


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """Tokens of an answer with the places where scores are read.

    Attributes:
        example: its `targets` are 0 where a score is read.
        ends: `[scores]`, characters of the answer up to the end of what each score is of.
    """

    example: Example
    ends: list[int]


class ScoredAnswers:
    """Tokenizes prompts with sampled answers.

    Args:
        tokenizer: of the reward model.
        folder: facts of the reward model.
        most: largest number of tokens.
        truncates: whether a longer answer is cut off, in place of an error.
    """

    def __init__(self, tokenizer: Tokenizer, folder: ScoreFolder, most: int, *, truncates: bool) -> None:
        self._tokenizer, self._folder = tokenizer, folder
        self._most, self._truncates = most, truncates
        self._answers = AnswerTokens(tokenizer, ExamplesSection(step_separator=folder.separator), any_text=True)
        self._plain = PlainTexts([*tokenizer.special_texts, *tokenizer.stop_texts])

    def of(
        self,
        prompt: Prompt,
        text: str,
        messages: Sequence[dict[str, Any]] = (),
        tokens: NDArray[np.int32] | None = None,
    ) -> ScoredAnswer:
        """Return the tokens of a prompt with an answer.

        Args:
            prompt: of the row.
            text: the answer.
            messages: conversation of an episode with its prompt, in place of both; empty for a single answer.
            tokens: `[len]`, those of the prompt with all placeholders of its media; None for a prompt of text.

        Raises:
            RowError: the reward model has no chat template for messages, or the whole is too long for it.
            SlowRowError: its tokenizer or its template did not end in time.
        """
        if prompt.messages or messages:
            self._tokenizer.formatter  # noqa: B018 loads transformers, which takes longer than a row
        try:
            answer = call_within(MAX_SECONDS, lambda: self._of(prompt, text, list(messages)))
        except TimeoutError as error:
            msg = f"the reward model's template and tokenizer did not end within {MAX_SECONDS:g} s for a sample"
            raise SlowRowError(msg) from error
        if tokens is not None:
            answer = replace(answer, example=_behind(tokens, answer.example))
            if len(tokens) >= self._most:
                msg = (
                    f"a prompt with its media has {len(tokens)} tokens, and the reward model reads {self._most} of its "
                    "context or trainer.max_tokens_per_microbatch; raise that, or make the media smaller ([media])"
                )
                raise RowError(msg)
        return self._limited(answer)

    def _of(self, prompt: Prompt, text: str, messages: list[dict[str, Any]]) -> ScoredAnswer:
        if (prompt.messages or messages) and not self._tokenizer.has_chat_template:
            msg = (
                "the prompt is a chat, and the reward model has no chat template; add chat_template.jinja to its "
                "folder, or set data.chat = false"
            )
            raise RowError(msg)
        prompt = replace(prompt, messages=self._plain.within(prompt.messages))
        if self._folder.of_steps:
            steps = steps_of(text, self._folder.separator)
            ends = list(accumulate(len(step) + len(self._folder.separator) for step in steps))
            example = self._answers.steps(prompt, self._plain.within(steps), [0.0] * len(steps))
            return ScoredAnswer(example, [min(end, len(text)) for end in ends])
        while messages and messages[-1]["role"] != ASSISTANT:  # what an environment showed last
            messages.pop()
        if not messages:
            example = self._answers.example(prompt, self._plain.of(text), may_be_empty=True)
        else:
            example = self._answers.example(prompt, self._plain.within(messages))
        return ScoredAnswer(at_end(example, 0.0), [len(text)])

    def _limited(self, answer: ScoredAnswer) -> ScoredAnswer:
        example = answer.example
        read = int(np.flatnonzero(example.mask)[-1]) + 1  # no score depends on tokens behind the last place
        ids, mask = example.ids[:read], example.mask[:read]
        is_cut = read > self._most
        if is_cut and not self._truncates:
            msg = (
                f"a prompt with its answer has {read} tokens for the reward model, more than {self._most} "
                "of its context or trainer.max_tokens_per_microbatch; raise that, or set roles.reward_model.oversize = "
                '"truncate_right"'
            )
            raise RowError(msg)
        if is_cut:
            ids, mask = ids[: self._most], mask[: self._most].copy()
            if not mask.any():
                mask[-1] = True  # the score of what is left
        targets = np.where(mask, np.float32(0), np.float32(np.nan))
        count = int(np.count_nonzero(mask))
        return ScoredAnswer(
            Example(ids, example.trained[: len(ids)], is_cut=is_cut, targets=targets), answer.ends[:count]
        )


def _behind(prompt: NDArray[np.int32], example: Example) -> Example:
    """Return the answer of an example behind other tokens of its prompt, `[len]`."""
    begin = int(np.argmax(example.trained))
    ids = np.concatenate([prompt, example.ids[begin:]]).astype(np.int32)
    trained = np.concatenate([np.zeros(len(prompt), np.bool_), example.trained[begin:]])
    return at_end(Example(ids, trained), 0.0)
