"""Reward for mathematical equality, by the package math-verify."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from relax_actors.errors import RowError
from relax_actors.messages import Prompt
from relax_actors.registry.dotted import import_extra
from relax_actors.rewards._text import compares, required_answer
from relax_actors.rewards.loading import requires


def package() -> Any:
    """The package math-verify; raises ConfigError if it is not installed."""
    module = import_extra("math_verify", "math", "reward 'math_verify'")
    # It warns at every start that its time limit is off, which is intended (see `math_verify`).
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return module


@compares
@requires(package)
def math_verify(completion: str, prompt: Prompt) -> float:
    r"""Return 1 if the last expression of the completion equals the answer, else 0.

    In the completion the expression is LaTeX in dollars or `\boxed{}`, or a bare number; the answer may also be bare
    LaTeX. The package's own time limit is off, because it uses signals, which only the main thread may handle. An
    expression on which sympy does not end (`9^{9^{9^{9}}}`) blocks the actor until its deadline, when it is replaced.

    Raises:
        RowError: the answer contains no expression.
    """
    answer = required_answer(prompt, "math_verify")
    gold = _parsed(answer)
    if not gold:
        msg = f"reward math_verify finds no expression in the answer {answer!r:.80}; fix the row or use exact_match"
        raise RowError(msg)
    given = package().parse(completion, parsing_timeout=None)
    return float(package().verify(list(gold), given, timeout_seconds=None))


@lru_cache(maxsize=1024)
def _parsed(answer: str) -> tuple[Any, ...]:
    """Parse an answer once for all samples of its prompt; bare LaTeX is put between dollars."""
    parse = package().parse
    return tuple(parse(f"${answer}$", parsing_timeout=None) or parse(answer, parsing_timeout=None))
