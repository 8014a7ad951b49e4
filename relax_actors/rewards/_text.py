"""Rewards that compare texts."""

from __future__ import annotations

from relax_actors.errors import RowError
from relax_actors.messages import Prompt


def exact_match(completion: str, prompt: Prompt) -> float:
    """Return 1 if the completion is the answer, white space around them aside, else 0."""
    return float(completion.strip() == required_answer(prompt, "exact_match"))


def positional_match(completion: str, prompt: Prompt) -> float:
    """Return the share of characters that stand where the answer has them, 0 to 1.

    White space around both is dropped; the share is of the longer text, so 1 means equal.
    """
    text, answer = completion.strip(), required_answer(prompt, "positional_match")
    hits = sum(mine == right for mine, right in zip(text, answer, strict=False))
    return hits / max(len(text), len(answer))


def required_answer(prompt: Prompt, reward_name: str) -> str:
    """Return the prompt's answer, stripped.

    Raises:
        RowError: there is none.
    """
    answer = prompt.answer.strip()
    if not answer:
        msg = f"reward {reward_name} compares with the answer, the prompt {prompt.text!r:.80} has none; {REMEDY}"
        raise RowError(msg)
    return answer


REMEDY = "set data.answer_field to the field that holds it"
