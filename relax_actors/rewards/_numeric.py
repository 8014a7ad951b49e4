"""Reward for the last number of a completion."""

from __future__ import annotations

import re
from fractions import Fraction

from relax_actors.errors import RowError
from relax_actors.messages import Prompt
from relax_actors.rewards._text import compares, required_answer

TOLERANCE = Fraction(1, 10**6)
_DIGITS, _EXPONENT_DIGITS = 1000, 3  # longer numbers only cost time
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?"
_NUMBER = re.compile(rf"(?:(?<![\w)\]}}.])[+-])?(?:{_DECIMAL})(?:\s?/\s?(?:{_DECIMAL}))?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}")


@compares
def numeric_match(completion: str, prompt: Prompt) -> float:
    r"""Return 1 if the last number of the completion is the last number of the answer, else 0.

    Understands signs, decimals, powers of ten (`1e-3`), thousands (`1,234`) and fractions (`3/4`, `\frac{3}{4}`).
    Whole numbers must be equal; other numbers must be within one part in a million of the answer.

    Raises:
        RowError: the answer contains no number.
    """
    answer = required_answer(prompt, "numeric_match")
    expected = last_number(answer)
    if expected is None:
        msg = f"reward numeric_match finds no number in the answer {answer!r:.80}; fix the row or use exact_match"
        raise RowError(msg)
    given = last_number(completion)
    if given is None:
        return 0.0
    if given.denominator == expected.denominator == 1:
        return float(given == expected)
    return float(abs(given - expected) <= TOLERANCE * abs(expected))


def last_number(text: str) -> Fraction | None:
    """The last number in the text; None if there is none."""
    text = _LATEX_FRACTION.sub(r"\1/\2", text.replace("\N{MINUS SIGN}", "-"))
    matches = _NUMBER.findall(text)
    return _value(matches[-1]) if matches else None


def _value(number: str) -> Fraction | None:
    """Value of a number; None if it has no value (zero denominator) or is absurdly long."""
    top, _, bottom = re.sub(r"[\s,]", "", number).partition("/")
    parts = [_decimal(part) for part in (top, bottom or "1")]
    if parts[0] is None or not parts[1]:
        return None
    return parts[0] / parts[1]


def _decimal(text: str) -> Fraction | None:
    digits, _, exponent = text.lower().partition("e")
    if len(digits) > _DIGITS or len(exponent.lstrip("+-0")) > _EXPONENT_DIGITS:
        return None
    return Fraction(text)
