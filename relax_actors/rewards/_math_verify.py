"""Mathematical equality, by the package math-verify."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from relax_actors.errors import RowError
from relax_actors.messages import Prompt
from relax_actors.registry.dotted import import_extra
from relax_actors.rewards._text import required_answer


def math_verify(completion: str, prompt: Prompt) -> float:
    r"""Return 1 if the completion's last expression equals the answer, else 0.

    In the completion it is LaTeX in dollars or `\boxed{}`, or a bare number; the answer may also be bare LaTeX.

    The package's own time limit is off: it works by signals, which only the main thread may use. An expression that
    takes sympy for ever (`9^{9^{9^{9}}}`) holds the actor up until its lease ends and it is replaced.

    Raises:
        RowError: the answer holds no expression.
    """
    answer = required_answer(prompt, "math_verify")
    gold = _parsed(answer)
    if not gold:
        msg = f"reward math_verify finds no mathematics in the answer {answer!r:.80}; mend the row or use exact_match"
        raise RowError(msg)
    found = package().parse(completion, parsing_timeout=None)
    return float(package().verify(list(gold), found, timeout_seconds=None))


def package() -> Any:
    """Return the package.

    Raises:
        ConfigError: it is not installed.
    """
    module = import_extra("math_verify", "math", "reward 'math_verify'")
    # It warns at every start that its time limit is off; we know, see above.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return module


@lru_cache(maxsize=1024)
def _parsed(answer: str) -> tuple[Any, ...]:
    """Parse the answer once for the n samples of a prompt; a bare LaTeX expression is put between dollars."""
    parse = package().parse
    return tuple(parse(f"${answer}$", parsing_timeout=None) or parse(answer, parsing_timeout=None))
