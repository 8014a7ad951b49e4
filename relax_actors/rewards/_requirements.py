"""State what a reward function requires, so that it is checked before a run starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def requires(check: Callable[[], object]) -> Callable[[F], F]:
    """Decorate a reward function with a check that runs when the function is loaded.

    Args:
        check: raises `ConfigError` if the function cannot work, e.g. because its package is not installed.
    """

    def decorate(function: F) -> F:
        function.check_requirements = check  # type: ignore[attr-defined]
        return function

    return decorate
