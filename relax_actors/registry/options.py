"""Options of a class that users extend: annotated attributes, set from a table.

    class GuessNumber(Environment):
        limit: int = 15  # option `limit`

Attributes whose names begin with an underscore, `ClassVar`s and the attributes of the base class are no options.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, TypeVar

import pydantic

from relax_actors.errors import ConfigError

T = TypeVar("T")


def options_of(cls: type, base: type) -> dict[str, tuple[Any, Any]]:
    """Return the options of a class: name -> (type, default).

    Args:
        cls: the class.
        base: class that its users extend, whose own attributes are no options.
    """
    reserved = typing.get_type_hints(base).keys()
    return {
        name: (hint, getattr(cls, name, ...))
        for name, hint in typing.get_type_hints(cls, include_extras=True).items()
        if name not in reserved and not name.startswith("_") and typing.get_origin(hint) is not ClassVar
    }


def build(cls: type[T], base: type, given: dict[str, Any], where: str, prepare: str) -> T:
    """Create an instance without arguments and set its options.

    Args:
        cls: the class.
        base: class that its users extend.
        given: option values by name.
        where: the section they come from, for errors.
        prepare: method that should do what a constructor must not, for errors.

    Raises:
        ConfigError: an option is unknown, missing or of the wrong type, or the constructor fails.
    """
    values = checked_options(cls, base, given, where)
    try:
        made = cls()
    except Exception as error:
        msg = f"{where}: {cls.__name__}() raised {type(error).__name__}: {error}; do preparation in {prepare}()"
        raise ConfigError(msg) from error
    for name, value in values.items():
        setattr(made, name, value)
    return made


def checked_options(cls: type, base: type, given: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the value of every option of a class; arguments and errors as `build`."""
    try:
        # A role may have further options, as the roles that score have.
        own = getattr(cls, "options", None) if hasattr(base, "options") else None
        fields: dict[str, Any] = dict(options_of(cls, base) if own is None else own())
    except (NameError, TypeError) as error:
        msg = f"{where}: the annotations of {cls.__name__} give no options: {type(error).__name__}: {error}"
        raise ConfigError(msg) from error
    plain = {name for name in vars(cls) if not name.startswith("_") and name not in vars(base)}
    return validated(fields, given, where, cls.__name__, plain)


def validated(
    fields: Mapping[str, Any],
    given: Mapping[str, Any],
    where: str,
    owner: str,
    unannotated: Collection[str] = (),
) -> dict[str, Any]:
    """Return the value of every option, as its type.

    Args:
        fields: type and default of each option; the default is `...` where there is none.
        given: option values by name.
        where: the section they come from, for errors.
        owner: class or function that has the options, for errors.
        unannotated: attributes of the class that would be options with an annotation.

    Raises:
        ConfigError: an option is unknown, missing or of the wrong type, or a type cannot be checked.
    """
    strict = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    try:
        model = pydantic.create_model(owner, __config__=strict, **fields)
    except (NameError, TypeError, pydantic.PydanticUserError) as error:
        msg = f"{where}: the annotations of {owner} give no options: {type(error).__name__}: {error}"
        raise ConfigError(msg) from error
    try:
        values = model(**given)
    except pydantic.ValidationError as error:
        lines = [_explain(owner, e, where, list(fields), unannotated) for e in error.errors()]
        raise ConfigError(*lines) from error
    return {name: getattr(values, name) for name in fields}


def _explain(owner: str, error: Any, where: str, options: list[str], unannotated: Collection[str]) -> str:
    """Describe an error of pydantic in one line."""
    key, name = f"{where}.{'.'.join(map(str, error['loc']))}", str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        if name in unannotated:
            return f"{key}: {owner}.{name} is no option without an annotation; write `{name}: <type> = ...`"
        return f"{key}: unknown option of {owner}; {known_options(name, options)}"
    if error["type"] == "missing":
        return f"{key}: is missing; {owner} has no default for it"
    return f"{key}: {error['msg'].removeprefix('Value error, ')}, got {error['input']!r:.80}"


def known_options(name: str, options: Collection[str]) -> str:
    """Return the remedy for an unknown option: a close one, or all of them."""
    close = difflib.get_close_matches(name, options, 1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(options)) or 'none'}"
