"""Rewards that compare short answers after normalisation, as question answering does.

The normalisation and the F1 of tokens are those of SQuAD (Rajpurkar et al., arXiv 1606.05250).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator

from relax_actors.errors import RowError
from relax_actors.messages import Prompt
from relax_actors.rewards._text import final_part, required_answer

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalised(text: str) -> str:
    """Return a text in lower case, without punctuation and English articles, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def normalised_match(completion: str, prompt: Prompt) -> float:
    r"""Return 1 if the completion is one of the right answers after normalisation, else 0.

    Of the completion counts the last `<answer>` tag or `\boxed{}`, or all of it without one. Right are the answer, and
    the texts of `answers` in the row if it has that field.
    """
    found = normalised(final_part(completion))
    return float(any(found == normalised(answer) for answer in _answers(prompt, "normalised_match")))


def token_f1(completion: str, prompt: Prompt) -> float:
    """Return the F1 of the words that the completion shares with the right answer that fits best, 0 to 1.

    What counts as completion and as answer, and the normalisation, are those of `normalised_match`.
    """
    found = normalised(final_part(completion)).split()
    return max(_f1(found, normalised(answer).split()) for answer in _answers(prompt, "token_f1"))


def _f1(found: list[str], right: list[str]) -> float:
    if not found or not right:
        return float(found == right)
    shared = (Counter(found) & Counter(right)).total()
    return 2 * shared / (len(found) + len(right))


def _answers(prompt: Prompt, reward_name: str) -> Iterator[str]:
    """Yield the right answers of a row.

    Raises:
        RowError: the row has none, or its field `answers` is no list of texts.
    """
    several = prompt.metadata.get("answers")
    if several is None:
        yield required_answer(prompt, reward_name)
        return
    if not isinstance(several, list) or not several or not all(isinstance(answer, str) for answer in several):
        msg = f"reward {reward_name} reads the field answers of a row as a list of texts, this one is {several!r:.80}"
        raise RowError(msg)
    yield from several
    if prompt.answer.strip():
        yield prompt.answer
