"""Forms of a judge's answers: instructions, and reading a number from 0 to 1.

The answer of a judge is not trusted: it may repeat what a policy has written.
"""

from __future__ import annotations

import json
from typing import Any

SHARES = {"A": 1.0, "B": 0.0, "equal": 0.5}
"""Share of the first of two responses, by what a judge calls better."""
GRADE = 'End your answer with one JSON object: {{"reason": <one sentence>, "score": <whole number from 0 to {most}>}}'
CHOOSE = 'End your answer with one JSON object: {"reason": <one sentence>, "better": "A" or "B" or "equal"}'
GRADE_ALONE = "Answer with the grade alone, a whole number from 0 to {most}."
CHOOSE_ALONE = "Answer with A or B alone: the better response."


def read_grade(text: str, most: int) -> float:
    """Return an answer's final grade, divided by the highest; raises ValueError."""
    score = object_at_end(text).get("score")
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= most:
        msg = f"the judge gives the score {score!r:.80}, not a number from 0 to {most}"
        raise ValueError(msg)
    return score / most


def read_choice(text: str) -> float:
    """Return the share of response A that an answer ends with; raises ValueError if it has none."""
    better = object_at_end(text).get("better")
    if not isinstance(better, str) or better not in SHARES:
        msg = f"the judge calls {better!r:.80} better, not A, B or equal"
        raise ValueError(msg)
    return SHARES[better]


def object_at_end(text: str) -> dict[str, Any]:
    """Return the JSON object at the end of a text, no quoted one; raises ValueError without it."""
    rest = text.rstrip().removesuffix("```").rstrip()
    begin = -1
    while rest.endswith("}") and (begin := rest.find("{", begin + 1)) >= 0:
        try:
            parsed = json.loads(rest[begin:])
        except (ValueError, RecursionError):
            continue
        if isinstance(parsed, dict):
            return parsed
    msg = f"the judge's answer does not end with a JSON object: {text!r:.200}"
    raise ValueError(msg)


def grammar(values: dict[str, Any], reason: int) -> str:
    """Return the grammar of a reason and a verdict, in llguidance's Lark.

    Args:
        values: name of the verdict, and its schema.
        reason: characters of the reason at most, of printable ASCII without quotes and backslashes, so that each is at
            least one token less than a limit of tokens could cut off.
    """
    name, schema = next(iter(values.items()))
    body = {
        "type": "object",
        "properties": {"reason": {"type": "string", "pattern": f"^[ !#-\\[\\]-~]{{1,{reason}}}$"}, name: schema},
        "required": ["reason", name],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    return f"start: %json {json.dumps(body)}"
