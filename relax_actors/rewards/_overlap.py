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
    r"""Return 1 if the completion is one of the correct answers after normalisation, else 0.

    The text that counts is the last `<answer>` tag or `\boxed{}` of the completion, otherwise all of it. Correct
    answers are `answer` and the texts in `answers`, a field of the row. One that normalises to nothing, such as "A",
    is compared in lower case alone.
    """
    given, answers = final_part(completion), _answers(prompt, "normalised_match")
    return float(any(_words(given, answer) == _words(answer, answer) for answer in answers))


def token_f1(completion: str, prompt: Prompt) -> float:
    """Return the best F1 of words shared with a correct answer, 0 to 1.

    The text that counts, the correct answers and the normalisation are those of `normalised_match`.
    """
    given, answers = final_part(completion), _answers(prompt, "token_f1")
    return max(_f1(_words(given, answer), _words(answer, answer)) for answer in answers)


def _words(text: str, answer: str) -> list[str]:
    """Return the words of a text, normalised in the way that suits an answer."""
    return (normalised(text) if normalised(answer) else text.lower()).split()


def _f1(given: list[str], right: list[str]) -> float:
    if not given or not right:
        return float(given == right)
    shared = (Counter(given) & Counter(right)).total()
    return 2 * shared / (len(given) + len(right))


def _answers(prompt: Prompt, reward_name: str) -> Iterator[str]:
    """Yield a row's correct answers; raises RowError if there are none."""
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
