"""Reward by the scorers of reasoning-gym, which never execute text of the model."""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from relax_actors.errors import RowError
from relax_actors.messages import Prompt
from relax_actors.registry.dotted import import_extra
from relax_actors.rewards.loading import requires

Scorer = Callable[[str, dict[str, Any]], float]
_TUPLES = frozenset({"arc_agi", "rearc"})  # their scorers compare the grid with tuples; a cell holds lists


def package() -> Any:
    """The package reasoning-gym; raises ConfigError if it is not installed."""
    return import_extra("reasoning_gym", "tasks", "reward 'reasoning_gym_score'")


@requires(package)
def reasoning_gym_score(completion: str, prompt: Prompt) -> float:
    """Return the task's own score of the last `<answer>` tag or the whole text.

    Three scorers pass the answer to `eval`, and five to sympy's `parse_expr`, which also evaluates Python. These score
    an answer that is more than a literal or plain arithmetic as an empty answer. Where a scorer raises on an answer,
    the score is 0.

    Raises:
        RowError: the prompt is not a task of reasoning-gym, or its scorer raises on the task's own answer as well.
    """
    match prompt.metadata:
        case {"source_dataset": str(task), "entry": {"question": _, "answer": _, "metadata": dict()} as entry}:
            pass
        case _:
            msg = (
                f"reward reasoning_gym_score needs metadata source_dataset and entry, the prompt "
                f"{prompt.text!r:.80} has {sorted(prompt.metadata)}; "
                f"set data.kind = 'reasoning_gym' or use another reward"
            )
            raise RowError(msg)
    score = scorer(task, json.dumps(prompt.metadata.get("options", {}), sort_keys=True))
    answer = package().utils.extract_answer(completion)
    answer = completion.strip() if answer is None else answer
    if answer != str(entry["answer"]).strip() and not harmless(answer, score):
        answer = ""
    try:
        return _score(score, answer, task, entry)
    except Exception:  # noqa: BLE001 - the answer's fault, unless the next line raises as well
        _check_entry(score, task, entry)
        return 0.0


def _score(score: Scorer, answer: str, task: str, entry: dict[str, Any]) -> float:
    entry = copy.deepcopy(entry)  # some scorers write into it
    if task in _TUPLES:
        entry["metadata"]["output"] = tuple(map(tuple, entry["metadata"]["output"]))
    return float(score(answer, entry))


def _check_entry(score: Scorer, task: str, entry: dict[str, Any]) -> None:
    try:
        _score(score, entry["answer"] or "", task, entry)
    except Exception as error:
        msg = (
            f"reward reasoning_gym_score: the scorer of {task!r} raises {type(error).__name__}: {error} on the task's "
            f"own answer; the entry is broken, generate the prompt again with data.kind = 'reasoning_gym'"
        )
        raise RowError(msg) from error


@lru_cache(maxsize=128)
def scorer(task: str, options: str) -> Scorer:
    """The scorer of a task with its options (JSON), on which the scores of some tasks depend.

    Raises:
        RowError: reasoning-gym has no such task, or the task refuses the options.
    """
    try:
        dataset = package().create_dataset(task, **{**json.loads(options), "seed": 0, "size": 1})
    except (ValueError, TypeError, AssertionError) as error:
        msg = f"reward reasoning_gym_score: reasoning-gym refuses task {task!r} with {options} ({error}); fix the row"
        raise RowError(msg) from error
    score: Scorer = dataset.score_answer
    return score


_EVALUATES = frozenset({"eval", "exec"})
_PARSES = frozenset({"parse_expr", "sympify"})
_FUNCTIONS = re.compile(r"sqrt|cbrt|exp|log|ln|a?(?:sin|cos|tan|cot|sec|csc)h?|[aA]bs|pi")
_NAME = re.compile(r"[^\W\d]\w*")
_ARITHMETIC = re.compile(r"(?:[\w\s+\-*/^()=,]|\.(?!\s*[^\W\d]))*")


def harmless(answer: str, scorer: Callable[..., object]) -> bool:
    """Whether this scorer may evaluate the answer, or does not evaluate it at all.

    Text of a model is untrusted: reward pressure finds any code that a scorer executes.
    """
    names = set(getattr(scorer, "__func__", scorer).__code__.co_names)
    return (not names & _EVALUATES or is_literal(answer)) and (not names & _PARSES or is_arithmetic(answer))


def is_literal(answer: str) -> bool:
    """Whether the answer is a Python literal of numbers, strings and collections."""
    try:
        ast.literal_eval(answer.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def is_arithmetic(answer: str) -> bool:
    """Whether the answer is arithmetic: numbers, operators, letters and functions."""
    names = _NAME.findall(answer)
    return bool(_ARITHMETIC.fullmatch(answer)) and all(len(name) == 1 or _FUNCTIONS.fullmatch(name) for name in names)
