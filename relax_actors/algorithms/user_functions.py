"""Policy loss and correction that [algorithm] names, by name or dotted path; imports torch only with a built-in one.

A function's keyword-only arguments are settings of [algorithm].
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any, cast

from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import CORRECTIONS, POLICY_LOSSES


def load_policy_loss(algorithm: AlgorithmSection) -> Callable[..., Any]:
    """Load the policy loss of the run.

    Raises:
        ConfigError: it does not import, or is not a function.
    """
    return _function(POLICY_LOSSES.load(algorithm.surrogate, "algorithm.surrogate"), "surrogate", algorithm.surrogate)


def load_correction(algorithm: AlgorithmSection) -> Callable[..., Any]:
    """Load the off-policy correction of the run.

    Raises:
        ConfigError: it does not import, or is not a function.
    """
    kind = algorithm.correction.kind
    return _function(CORRECTIONS.load(kind, "algorithm.correction.kind"), "correction.kind", kind)


def check_user_functions(algorithm: AlgorithmSection) -> None:
    """Check that the user's policy loss and correction import and take settings that exist.

    Raises:
        ConfigError: one of them does not.
    """
    if algorithm.surrogate not in POLICY_LOSSES.built_in:
        settings_of(load_policy_loss(algorithm), algorithm)
    if algorithm.correction.kind not in CORRECTIONS.built_in:
        load_correction(algorithm)


def has_own_functions(algorithm: AlgorithmSection) -> bool:
    """Return whether the policy loss or the correction is a function of the user or of another package."""
    return algorithm.surrogate not in POLICY_LOSSES.built_in or algorithm.correction.kind not in CORRECTIONS.built_in


def settings_of(function: Callable[..., Any], algorithm: AlgorithmSection) -> dict[str, Any]:
    """Return the settings of [algorithm] that a function's keyword-only arguments name.

    Raises:
        ConfigError: [algorithm] has no setting of that name.
    """
    names = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if unknown := [name for name in names if name not in type(algorithm).model_fields]:
        msg = (
            f"{getattr(function, '__name__', function)} has the keyword-only argument {unknown[0]!r}, which is no "
            "setting of [algorithm]; name a setting, or make it a constant of the module"
        )
        raise ConfigError(msg)
    return {name: getattr(algorithm, name) for name in names}


def call_user_function(function: Callable[..., Any], source: str, *arguments: Any, **settings: Any) -> Any:
    """Call a user's function; an exception names the setting and the line.

    Args:
        function: the function.
        source: setting that names it, and of what it was called, for errors.
        arguments: its arguments.
        settings: its keyword-only arguments.

    Raises:
        ConfigError: the function raised an exception.
    """
    try:
        return function(*arguments, **settings)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}, line {last.lineno}"
        msg = f"{source} raised {type(error).__name__}: {error} ({where}); fix the function"
        raise ConfigError(msg) from error


def _function(found: object, setting: str, name: str) -> Callable[..., Any]:
    if not callable(found):
        msg = f"algorithm.{setting} = {name!r} is a {type(found).__name__}; name a function"
        raise ConfigError(msg)
    return cast("Callable[..., Any]", found)
