"""Decide which answers may be passed to a scorer that evaluates its input.

Text of a model is untrusted: reward pressure finds any code that a scorer executes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

_EVALUATES = frozenset({"eval", "exec"})
_PARSES = frozenset({"parse_expr", "sympify"})
_FUNCTIONS = re.compile(r"sqrt|cbrt|exp|log|ln|a?(?:sin|cos|tan|cot|sec|csc)h?|[aA]bs|pi")
_NAME = re.compile(r"[^\W\d]\w*")
_ARITHMETIC = re.compile(r"(?:[\w\s+\-*/^()=,]|\.(?!\s*[^\W\d]))*")


def harmless(answer: str, scorer: Callable[..., object]) -> bool:
    """Whether this scorer may evaluate the answer, or does not evaluate it at all."""
    names = set(getattr(scorer, "__func__", scorer).__code__.co_names)
    return (not names & _EVALUATES or is_literal(answer)) and (not names & _PARSES or is_arithmetic(answer))


def is_literal(answer: str) -> bool:
    """Whether the answer is a Python literal: numbers, strings, and lists, tuples, sets and dicts of these."""
    try:
        ast.literal_eval(answer.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def is_arithmetic(answer: str) -> bool:
    """Whether the answer consists of numbers, operators, one-letter variables and elementary functions."""
    names = _NAME.findall(answer)
    return bool(_ARITHMETIC.fullmatch(answer)) and all(len(name) == 1 or _FUNCTIONS.fullmatch(name) for name in names)
