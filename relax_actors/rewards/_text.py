"""Rewards that compare texts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from relax_actors.errors import RowError
from relax_actors.messages import Prompt

F = TypeVar("F", bound=Callable[..., Any])


def compares(function: F) -> F:
    """Decorate a reward that needs every row's answer, so that others are refused."""
    function.compares = True  # type: ignore[attr-defined]
    return function


@compares
def exact_match(completion: str, prompt: Prompt) -> float:
    """Return 1 if the completion equals the answer, else 0; surrounding white space is ignored."""
    return float(completion.strip() == required_answer(prompt, "exact_match"))


@compares
def positional_match(completion: str, prompt: Prompt) -> float:
    """Return the fraction of characters at the same position as in the answer, 0 to 1.

    Surrounding white space is ignored. The fraction is of the longer text, so that 1 means equal.
    """
    text, answer = completion.strip(), required_answer(prompt, "positional_match")
    hits = sum(mine == right for mine, right in zip(text, answer, strict=False))
    return hits / max(len(text), len(answer))


def required_answer(prompt: Prompt, reward_name: str) -> str:
    """The prompt's answer, stripped; raises RowError if the prompt has no answer."""
    answer = prompt.answer.strip()
    if not answer:
        msg = f"reward {reward_name} compares with the answer, the prompt {prompt.text!r:.80} has none; {REMEDY}"
        raise RowError(msg)
    return answer


REMEDY = "set data.fields.answer to the field with the answer"


_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")


def final_part(completion: str) -> str:
    r"""Return the last `<answer>`, else the last `\boxed{}`, else all of a completion."""
    parts = _TAG.findall(completion) or _BOXED.findall(completion)
    return (parts[-1] if parts else completion).strip()
