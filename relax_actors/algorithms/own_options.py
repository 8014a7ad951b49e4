"""Return f'(t) of f-DPO, x = log t the log-ratio (arXiv 2309.16240, theorem 1).

    def damped(inputs: PolicyInputs, *, clip_high: float, power: float = 2.0) -> Tensor

A keyword-only parameter that has the name of a setting of [algorithm] gets its value. Every other one is an option, of
the type of its annotation.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

from relax_actors.algorithms.specs import keyword_only, settings_accepted
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.errors import ConfigError
from relax_actors.registry.options import known_options, validated

TABLE = "algorithm.options"
SETTINGS = frozenset(AlgorithmSection.model_fields) - {"name", "options"}
"""Settings of [algorithm] that a function may read."""


def settings_of(function: Callable[..., Any], algorithm: AlgorithmSection) -> dict[str, Any]:
    """Return the settings of [algorithm] that a function's keyword-only parameters name."""
    return settings_accepted(function, {name: getattr(algorithm, name) for name in sorted(SETTINGS)})


def arguments_of(function: Callable[..., Any], algorithm: AlgorithmSection) -> dict[str, Any]:
    """Return a function's keyword-only arguments: settings of [algorithm], and options.

    Raises:
        ConfigError: an option is missing or of the wrong type, or an annotation is no type.
    """
    fields, owner = _options(function), _name(function)
    given = {name: value for name, value in algorithm.options.items() if name in fields}
    values = validated(fields, given, TABLE, owner) if fields else {}
    return settings_of(function, algorithm) | values


def check_options(algorithm: AlgorithmSection, functions: Sequence[Callable[..., Any]]) -> None:
    """Check that a function takes each of [algorithm.options]; raises ConfigError."""
    known = {name for function in functions for name in _options(function)}
    problems = []
    for name in (name for name in algorithm.options if name not in known):
        if name in SETTINGS:
            problems.append(f"{TABLE}.{name}: is a setting of [algorithm]; set algorithm.{name}")
        elif not functions:
            problems.append(f"{TABLE}.{name}: built-in functions take no options; remove it")
        else:
            owners = " or ".join(map(_name, functions))
            problems.append(f"{TABLE}.{name}: unknown option of {owners}; {known_options(name, known)}")
    if problems:
        raise ConfigError(*problems)


def _options(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's options by name, as type and default; raises ConfigError."""
    options = {name: p for name, p in keyword_only(function).items() if name not in SETTINGS}
    written = {name: p.annotation for name, p in options.items() if p.annotation is not p.empty}
    # Annotations of other parameters may name what is imported for type checkers only.
    names = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        hints = typing.get_type_hints(type("Options", (), {"__annotations__": written}), names, include_extras=True)
    except (NameError, TypeError, SyntaxError) as error:
        msg = f"{TABLE}: the annotations of {_name(function)} give no options: {type(error).__name__}: {error}"
        raise ConfigError(msg) from error
    return {name: (hints.get(name, Any), ... if p.default is p.empty else p.default) for name, p in options.items()}


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))
