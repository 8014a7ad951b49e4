"""Rewards for transcripts by the edit distance to the answer."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from relax_actors.errors import RowError
from relax_actors.messages import Prompt
from relax_actors.rewards._text import compares, required_answer

_PUNCTUATION = re.compile(r"(?<!\w)'|'(?!\w)|[^\w\s']|_")  # all but an apostrophe inside a word


@compares
def character_error_rate(completion: str, prompt: Prompt) -> float:
    """Return 1 minus the character error rate, 0 to 1; 1 means equal after normalisation.

    The rate is the number of characters to insert, delete or replace, divided by the length of the answer. Both texts
    are normalised: Unicode NFKC, case folded, without punctuation, white space as single spaces.

    Raises:
        RowError: nothing of the answer remains after normalisation.
    """
    return _one_minus_rate(_normalised(completion), _expected(prompt, "character_error_rate"))


@compares
def word_error_rate(completion: str, prompt: Prompt) -> float:
    """Return 1 minus the word error rate, 0 to 1; see `character_error_rate`."""
    return _one_minus_rate(_normalised(completion).split(), _expected(prompt, "word_error_rate").split())


def edit_distance(one: Sequence[str], other: Sequence[str]) -> int:
    """The Levenshtein distance, bit-parallel (Myers 1999, Hyyrö 2001)."""
    if not one:
        return len(other)
    positions: dict[str, int] = {}
    for index, item in enumerate(one):
        positions[item] = positions.get(item, 0) | 1 << index
    mask, last, distance = (1 << len(one)) - 1, 1 << len(one) - 1, len(one)
    rises, falls = mask, 0  # where a column of the table of distances grows and shrinks by one
    for item in other:
        same = positions.get(item, 0)
        carried = (((same & rises) + rises) ^ rises) | same
        right_rises, right_falls = falls | (mask & ~(carried | rises)), rises & carried
        distance += bool(right_rises & last) - bool(right_falls & last)
        right_rises, right_falls = right_rises << 1 | 1, right_falls << 1
        rises, falls = mask & (right_falls | ~(same | falls | right_rises)), mask & right_rises & (same | falls)
    return distance


def _one_minus_rate(given: Sequence[str], expected: Sequence[str]) -> float:
    if len(given) >= 2 * len(expected):  # the distance is at least the answer's length, however long the completion
        return 0.0
    return max(0.0, 1 - edit_distance(expected, given) / len(expected))


def _expected(prompt: Prompt, reward_name: str) -> str:
    answer = required_answer(prompt, reward_name)
    text = _normalised(answer)
    if not text:
        msg = f"reward {reward_name}: the answer {answer!r:.80} has no letter or digit to compare; fix the row"
        raise RowError(msg)
    return text


def _normalised(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).casefold().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    return " ".join(_PUNCTUATION.sub(" ", text).split())
