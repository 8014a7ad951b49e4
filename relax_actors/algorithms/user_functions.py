"""Functions that [algorithm] names, by name or dotted path; imports torch only with a built-in one."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, cast

from relax_actors.algorithms.own_options import arguments_of, check_options
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import ADVANTAGES, CORRECTIONS, POLICY_LOSSES


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
    """Check that the user's algorithm functions import, and that [algorithm.options] has what they take.

    Raises:
        ConfigError: one does not import, or an option is missing, unknown or of the wrong type.
    """
    functions: list[Callable[..., Any]] = []
    if algorithm.surrogate not in POLICY_LOSSES.built_in:
        functions.append(load_policy_loss(algorithm))
    if algorithm.correction.kind not in CORRECTIONS.built_in:
        functions.append(load_correction(algorithm))
    if algorithm.advantage not in ADVANTAGES.built_in:
        functions.append(ADVANTAGES.load(algorithm.advantage, "algorithm.advantage"))
    check_options(algorithm, functions)
    for function in functions:
        arguments_of(function, algorithm)


def has_own_functions(algorithm: AlgorithmSection) -> bool:
    """Return whether the policy loss or the correction is a function of the user or of another package."""
    return algorithm.surrogate not in POLICY_LOSSES.built_in or algorithm.correction.kind not in CORRECTIONS.built_in


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
