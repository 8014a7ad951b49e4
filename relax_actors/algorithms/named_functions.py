"""Functions of [algorithm] by name or dotted path, and their facts."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

from relax_actors.algorithms.own_options import arguments_of, check_options
from relax_actors.algorithms.specs import AdvantageSpec, LossSpec, advantage_spec, loss_spec, settings_read
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from relax_actors.registry.registry import Registry

Function = Callable[..., Any]


def load_advantage(name: str) -> Function:
    """Load an advantage estimator; raises ConfigError."""
    return _load(ADVANTAGES, name, "advantage", "a function of a Group", advantage_spec)


def load_policy_loss(name: str) -> Function:
    """Load a policy loss; errors as `load_advantage`."""
    return _load(POLICY_LOSSES, name, "surrogate", facts_of=loss_spec)


def load_correction(kind: str) -> Function:
    """Load an off-policy correction; errors as `load_advantage`."""
    return _load(CORRECTIONS, kind, "correction.kind")


def spec_of_advantage(algorithm: AlgorithmSection) -> AdvantageSpec:
    """Return the facts of `algorithm.advantage`; none if it does not load."""
    try:
        return advantage_spec(load_advantage(algorithm.advantage))
    except ConfigError:
        return AdvantageSpec()


def spec_of_loss(algorithm: AlgorithmSection) -> LossSpec:
    """Return the facts of `algorithm.surrogate`, as `spec_of_advantage`."""
    try:
        return loss_spec(load_policy_loss(algorithm.surrogate))
    except ConfigError:
        return LossSpec()


def needs_whole_step(algorithm: AlgorithmSection) -> bool:
    """Whether advantages need the whole step in order, so that its backward cannot start before."""
    wide = algorithm.whiten != "none" or algorithm.scale == "batch_std" or algorithm.signal_scale
    wide = wide or algorithm.positive_nll > 0 or algorithm.observation_nll > 0
    return wide or spec_of_advantage(algorithm).running_mean


@cache
def readers(registry: Registry[Function], setting: str) -> list[str]:
    """Return the built-in functions that read a setting of [algorithm]."""
    return [name for name in registry.built_in if setting in settings_read(registry.load(name, ""))]


def advantages_with(is_meant: Callable[[AdvantageSpec], bool]) -> str:
    """Return built-in estimators with certain facts: `"ema", "returns" or "gae"`."""
    *others, last = (f'"{name}"' for name in ADVANTAGES.built_in if is_meant(advantage_spec(load_advantage(name))))
    return f"{', '.join(others)} or {last}" if others else last


def check_user_functions(algorithm: AlgorithmSection) -> None:
    """Check that users' algorithm functions import, with the options they take.

    Raises:
        ConfigError: one does not import, or an option is missing, unknown or of the wrong type.
    """
    functions: list[Callable[..., Any]] = []
    if algorithm.surrogate not in POLICY_LOSSES.built_in:
        functions.append(load_policy_loss(algorithm.surrogate))
    if algorithm.correction.kind not in CORRECTIONS.built_in:
        functions.append(load_correction(algorithm.correction.kind))
    if algorithm.advantage not in ADVANTAGES.built_in:
        functions.append(load_advantage(algorithm.advantage))
    check_options(algorithm, functions)
    for function in functions:
        arguments_of(function, algorithm)


def has_own_functions(algorithm: AlgorithmSection) -> bool:
    """Return whether policy loss or correction is a function of a user or package."""
    return algorithm.surrogate not in POLICY_LOSSES.built_in or algorithm.correction.kind not in CORRECTIONS.built_in


def call_user_function(function: Callable[..., Any], source: str, *arguments: Any, **settings: Any) -> Any:
    """Call a user's function; raises ConfigError with the setting and the line."""
    try:
        return function(*arguments, **settings)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}, line {last.lineno}"
        msg = f"{source} raised {type(error).__name__}: {error} ({where}); fix the function"
        raise ConfigError(msg) from error


def _load(
    registry: Registry[Function],
    name: str,
    setting: str,
    kind: str = "a function",
    facts_of: Callable[[Function], object] | None = None,
) -> Function:
    """Load a function and check its facts; `kind` is for errors."""
    function = registry.load(name, f"algorithm.{setting}")
    if not callable(function):
        msg = f"algorithm.{setting} = {name!r} is a {type(function).__name__}; name {kind}"
        raise ConfigError(msg)
    try:
        if facts_of is not None:
            facts_of(function)
    except ConfigError as error:
        msg = f"algorithm.{setting} = {name!r}: {error}"
        raise ConfigError(msg) from error
    return function
