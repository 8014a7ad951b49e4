"""What majority@k counts as the answer of a text; by the same functions by which rewards read answers."""

from __future__ import annotations

from relax_actors.rewards._choice import chosen
from relax_actors.rewards._numeric import last_number
from relax_actors.rewards._text import final_part

MAX_VOTE = 2000
"""Characters of an answer that are compared."""


def vote_of(text: str, form: str) -> str:
    """Return what a text answers in the form `eval.vote`: "final", "number" or "letter".

    Equal answers give equal strings, and a text without an answer an empty one.
    """
    if form == "number":
        number = last_number(text)
        return "" if number is None else str(number)
    if form == "letter":
        return chosen(final_part(text), []) or ""
    return " ".join(final_part(text).split())[:MAX_VOTE]
