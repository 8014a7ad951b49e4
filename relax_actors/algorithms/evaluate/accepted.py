"""Settings and inputs that a case's function reads; others are refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def check_name(name: str, known: Collection[str]) -> None:
    """Raise ValueError unless a function of this name exists."""
    if name not in known:
        msg = f"name = {name!r} is not known; known: {', '.join(known)}"
        raise ValueError(msg)


def check_settings(
    function: str, settings: Mapping[str, Any], read: Collection[str], remedies: Mapping[str, str] | None = None
) -> None:
    """Raise ValueError unless the function, a kind and name of a case, reads every setting.

    `remedies` say what to do in place of other settings, by name; they are to be removed if it is not known.
    """
    for name in settings:
        if name not in read:
            instead = (remedies or {}).get(name, f"remove it. It reads: {_listed(read)}")
            msg = f"{function} does not read the setting {name!r}; {instead}"
            raise ValueError(msg)


def number(settings: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a setting outside of the configuration; raises TypeError."""
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        msg = f"setting {name} is {value!r}; give a number"
        raise TypeError(msg)
    return float(value)


def whole_number(settings: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a setting that must be a whole number; errors as `number`."""
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"setting {name} is {value!r}; give a whole number"
        raise TypeError(msg)
    return value


def check_inputs(function: str, given: Collection[str], read: Collection[str]) -> None:
    """Raise ValueError unless the function, a kind and name of a case, has read every input."""
    for name in given:
        if name not in read:
            msg = f"{function} does not read the input {name!r}; remove it. It reads: {_listed(read)}"
            raise ValueError(msg)


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "none"
