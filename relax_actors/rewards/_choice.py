"""Reward for the letter of a multiple-choice question."""

from __future__ import annotations

import re
import string

from relax_actors.errors import RowError
from relax_actors.messages import Prompt
from relax_actors.rewards._text import compares, final_part, required_answer

_STATED = re.compile(
    r"(?i:\b(?:answer|option|choice)\b)(?i:\s+is\b)?[\s:=*$]{0,4}[(\[]?([B-HJ-Z]|[AI](?!\s+[a-z]))(?![\w'])"
)
_MARKED = re.compile(r"[(\[]([A-Za-z])[)\]]")
_BARE = re.compile(r"(?<![\w'])([B-HJ-Z]|[AI](?!\s+[a-z]))(?![\w'])")  # "A dog", "I think" are words


@compares
def multiple_choice(completion: str, prompt: Prompt) -> float:
    r"""Return 1 if the completion chooses the right choice, else 0.

    The answer is a letter, or the text of a choice. The choices are the metadata's `choices`: a list of texts, the
    first of which is A; without them any letter is a choice. Of the last `<answer>` tag, the last `\boxed{}` or the
    whole completion it takes: a letter or the text of a choice alone, a stated letter ("the answer is B"), the last
    letter in brackets, the last capital letter, the only choice whose text is mentioned. Listing letters therefore
    chooses one of them.

    Raises:
        RowError: the answer is none of the choices, or `choices` is no list.
    """
    answer = required_answer(prompt, "multiple_choice")
    choices = _choices(prompt)
    expected = _alone(answer, choices)
    if expected is None:
        known = ", ".join(choices) if choices else "the letters A to Z"
        msg = f"reward multiple_choice: the answer {answer!r:.80} is none of the choices ({known:.200}); fix the row"
        raise RowError(msg)
    return float(chosen(final_part(completion), choices) == expected)


def chosen(text: str, choices: list[str]) -> str | None:
    """The letter of the choice that the text makes; None if it makes none."""
    alone = _alone(text, choices)
    if alone is not None:
        return alone
    letters = _letters(choices)
    for pattern in (_STATED, _MARKED, _BARE):
        stated = [match[1].upper() for match in pattern.finditer(text)]
        known = [letter for letter in stated if letter in letters]
        if known:
            return known[-1]
    words = _words(text)
    mentioned = {
        letter: _words(choice)
        for letter, choice in zip(letters, choices, strict=False)
        if choice.strip() and re.search(rf"(?<!\w){re.escape(_words(choice))}(?!\w)", words)
    }
    # "a cat and a dog" mentions "a cat", too.
    longest = [
        one for one in mentioned if not any(mentioned[one] in each for each in {*mentioned.values()} - {mentioned[one]})
    ]
    return longest[0] if len(longest) == 1 else None


def _alone(text: str, choices: list[str]) -> str | None:
    """The choice that the text names and nothing else."""
    letters = _letters(choices)
    bare = text.strip(" \t\r\n()[].:*$").upper()
    if len(bare) == 1 and bare in letters:
        return bare
    same = [letter for letter, choice in zip(letters, choices, strict=False) if _words(choice) == _words(text)]
    return same[0] if same and _words(text) else None


def _choices(prompt: Prompt) -> list[str]:
    choices = prompt.metadata.get("choices") or []
    if isinstance(choices, list) and len(choices) <= len(string.ascii_uppercase):
        return [str(choice) for choice in choices]
    msg = f"reward multiple_choice: metadata choices is {choices!r:.80}; give a list of at most 26 texts"
    raise RowError(msg)


def _letters(choices: list[str]) -> str:
    return string.ascii_uppercase[: len(choices) or None]


def _words(text: str) -> str:
    return " ".join(text.casefold().rstrip(".").split())
