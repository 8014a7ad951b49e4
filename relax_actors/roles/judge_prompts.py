"""Questions of a judge as tokens of its model, whatever a policy has written."""

from __future__ import annotations

from collections.abc import Sequence
from string import Formatter

import numpy as np
from numpy.typing import NDArray

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import ConfigError, RowError, TooLongError
from relax_actors.rewards.judging.material import escaped
from relax_actors.rewards.judging.questions import RESPONSES, Grading, Question

ENDS = ('"', "\n")
"""Characters that no text of a question contains, since they are escaped."""
GAP = " ... "
"""Stands for what is left out of a text that is too long."""
MOST_CUTS = 100
SHRINK = 0.95


class JudgePrompts:
    """Writes questions as tokens of a judge's model.

    Texts are shortened in their middle, the longest first, until they fit `room` tokens. A policy's text cannot add a
    message, a special token or a part: see `relax_actors.rewards.judging.material`. A `template` has the names of the
    question's texts in braces, and takes the place of a chat.
    """

    def __init__(self, tokenizer: Tokenizer, grading: Grading, how: str, template: str, room: int) -> None:
        self._tokenizer, self._grading, self._how, self._room = tokenizer, grading, how, room
        self._template = list(Formatter().parse(template))
        self._special = tokenizer.special_texts
        self.shortened = 0
        """Questions that were shortened."""

    def tokens(self, question: Question) -> NDArray[np.int32]:
        """Return a question's tokens, `[len] int32`; raises RowError if refused or too long."""
        texts = dict(question)
        for cuts in range(MOST_CUTS):
            size = None
            try:
                ids = self._encoded(texts)
                size = len(ids)
            except TooLongError:
                pass
            if size is not None and size <= self._room:
                self.shortened += cuts > 0
                return ids
            longest = max(texts, key=lambda name: len(texts[name]))
            kept = SHRINK * (0.5 if size is None else self._room / size)
            texts[longest] = cut_middle(texts[longest], int(kept * len(texts[longest])))
        msg = f"the judge's context has no room for the question: it takes {self._room} tokens; shorten the rubric"
        raise RowError(msg)

    def _encoded(self, texts: Question) -> NDArray[np.int32]:
        if not self._template:
            messages = self._grading.messages(texts, self._how, self._special)
            return self._tokenizer.encode_any(self._tokenizer.chat(messages), special=False)
        parts = [
            literal + (escaped(texts[name], self._special) if name else "") for literal, name, _, _ in self._template
        ]
        return self._tokenizer.encode_any("".join(parts))


def cut_middle(text: str, length: int) -> str:
    """Return a text of at most this many characters, with its begin and its end."""
    if len(text) <= length:
        return text
    kept = max(0, length - len(GAP))
    return text[: kept - kept // 2] + GAP[:length] + (text[len(text) - kept // 2 :] if kept // 2 else "")


def check_template(template: str, grading: Grading, setting: str) -> None:
    """Check that a template shows responses that cannot end their part; raises ConfigError."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        msg = f"{setting} {template[:60]!r} is not a template: {error}; write {{{{ and }}}} for braces"
        raise ConfigError(msg) from error
    names = [name for _, name, _, _ in parts if name is not None]
    known = ", ".join(f"{{{name}}}" for name in grading.names)
    if unknown := sorted(set(names) - {*grading.names}):
        msg = f'{setting} names {{{unknown[0]}}}; with mode = "{grading.mode}" it may name {known}'
        raise ConfigError(msg)
    if missing := [name for name in grading.names if name in RESPONSES and name not in names]:
        msg = f"{setting} {template[:60]!r} lacks {{{missing[0]}}}, which the judge grades; add it"
        raise ConfigError(msg)
    behind = [*(literal for literal, _, _, _ in parts[1:]), ""]
    for (_, name, _, _), literal in zip(parts, behind, strict=True):
        if name is not None and not literal.startswith(ENDS):
            msg = (
                f'{setting} {template[:60]!r}: a quote " or a line break must follow {{{name}}}, as in '
                f"'\"{{{name}}}\"': only these cannot occur in the text itself; otherwise the text could continue as "
                "another part"
            )
            raise ConfigError(msg)


def choices_of(tokenizer: Tokenizer, texts: Sequence[str], setting: str) -> list[NDArray[np.int32]]:
    """Return the tokens of the answers among which a judge chooses, `[len] int32` each.

    Raises:
        ConfigError: the tokenizer cannot encode one, or one begins with another, so that their probabilities overlap.
    """
    choices: list[NDArray[np.int32]] = []
    for text in texts:
        try:
            choices.append(tokenizer.encode(text, special=False))
        except RowError as error:
            msg = f"{setting}: the judge's model cannot write the answer {text!r}: {error}; use another model"
            raise ConfigError(msg) from error
    for i, one in enumerate(choices):
        for k, other in enumerate(choices):
            if i != k and np.array_equal(one, other[: len(one)]):
                msg = (
                    f"{setting}: in the judge's tokens the answer {texts[k]!r} begins with {texts[i]!r}, so their "
                    "probabilities overlap; lower most, to at most 9 for single digits"
                )
                raise ConfigError(msg)
    return choices
