"""Kinds of functions that can be evaluated, and the evaluation of a list of cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from relax_actors.algorithms.evaluate.accepted import check_inputs
from relax_actors.algorithms.evaluate.inputs import Evaluation, Inputs, as_json
from relax_actors.registry.dotted import load

_LOSSES = "relax_actors.algorithms.evaluate.losses"
KINDS: dict[str, str] = {
    "advantage": "relax_actors.algorithms.evaluate.advantages:advantage",
    "policy_loss": "relax_actors.algorithms.evaluate.policy:policy_loss",
    "kl": f"{_LOSSES}:kl",
    "logprobs": f"{_LOSSES}:logprobs",
    "entropy": f"{_LOSSES}:entropy",
    "value_loss": f"{_LOSSES}:value_loss",
    "aggregation": f"{_LOSSES}:aggregation",
    "correction": "relax_actors.algorithms.evaluate.corrections:correction",
    "shaping": "relax_actors.algorithms.evaluate.shaping:penalty",
    "distillation": "relax_actors.algorithms.evaluate.distillation:distillation",
}
"""Evaluator of each kind: `function(name, settings, inputs) -> Evaluation`."""

Evaluator = Callable[[str, Mapping[str, Any], Inputs], Evaluation]


def evaluate(cases: Sequence[Any]) -> list[dict[str, Any]]:
    """Evaluate cases; a case that fails has an `error` and no outputs."""
    return [_evaluate(case) for case in cases]


def _evaluate(case: Any) -> dict[str, Any]:
    label = {key: case.get(key) for key in ("kind", "name")} if isinstance(case, Mapping) else {}
    try:
        inputs, result = _result(case)
        lengths = inputs.lengths if inputs.has_tokens else []
        outputs = {name: as_json(value, lengths) for name, value in result.outputs.items()}
        gradients = {name: as_json(value, lengths) for name, value in result.gradients.items()}
    except ValidationError as error:
        return {**label, "error": f"ValueError: {_first(error)}"}
    except Exception as error:  # noqa: BLE001 one bad case must not hide the others
        return {**label, "error": f"{type(error).__name__}: {error}"}
    return {**label, "outputs": outputs, "gradients": gradients}


def _first(error: ValidationError) -> str:
    """Return the first message of a validation error, on one line."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"setting {where}: {message}" if where else message


def _result(case: Any) -> tuple[Inputs, Evaluation]:
    if not isinstance(case, Mapping) or not isinstance(case.get("inputs"), Mapping):
        msg = 'a case is an object {"kind": ..., "name": ..., "settings": {...}, "inputs": {...}}'
        raise TypeError(msg)
    if unexpected := sorted(set(case) - {"kind", "name", "settings", "inputs"}):
        msg = f"a case has the unknown key {unexpected[0]!r}; known: kind, name, settings, inputs"
        raise ValueError(msg)
    kind = case.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        msg = f"kind = {kind!r} is not known; known: {', '.join(KINDS)}"
        raise ValueError(msg)
    if not isinstance(settings := case.get("settings") or {}, Mapping):
        msg = f"settings is a {type(settings).__name__}; give an object of settings by name"
        raise TypeError(msg)
    function: Any = load(KINDS[kind], "kind")
    inputs, name = Inputs(case["inputs"]), str(case.get("name", ""))
    evaluator: Evaluator = function
    result = evaluator(name, settings, inputs)
    check_inputs(f"{kind} {name!r}", inputs.raw, inputs.read)
    return inputs, result
