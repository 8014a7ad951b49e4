"""Check of a user's role class before a run starts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import is_dataclass

from broker.subjects import check_kind, check_name
from relax_actors.errors import ConfigError, SubjectError
from relax_actors.runtime.role import Role
from relax_actors.runtime.row import END_COLUMNS, REDELIVERY, ROW_KINDS
from relax_actors.runtime.service_role import ServiceRole
from relax_actors.runtime.stateful_role import StatefulRole


def _constructor_arguments(cls: type[Role]) -> list[str]:
    """Names of a role's constructor arguments, without `*args` and `**kwargs`."""
    makes_itself = cls.build.__func__ is not Role.build.__func__  # type: ignore[attr-defined]
    if cls.__init__ is object.__init__ or makes_itself:
        return []
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _role_class(cls: object, where: str) -> type[Role]:
    """Return `cls` if it is a `Role` without constructor arguments; see `check_role`."""
    if not (isinstance(cls, type) and issubclass(cls, Role)):
        msg = f"{where} names {cls!r}, which is not a subclass of relax_actors.Role; write `class <Name>(Role):`"
        raise ConfigError(msg)
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        msg = f"{where}: {cls.__name__} is abstract: it lacks {', '.join(missing)}; define them, or name a subclass"
        raise ConfigError(msg)
    if own := _constructor_arguments(cls):
        msg = (
            f"{where}: the constructor of {cls.__name__} takes {', '.join(own)}; a role is made without arguments. "
            f"Remove __init__, write options as annotated attributes of the class, e.g. `{own[0]}: int = 1`, and do "
            "other preparation in setup()"
        )
        raise ConfigError(msg)
    return cls


def _is_kind(entry: tuple[object, object]) -> bool:
    """Whether an entry of `RoleSpec.numbered` is a name and a dataclass."""
    name, cls = entry
    return isinstance(name, str) and isinstance(cls, type) and is_dataclass(cls)


def check_role(cls: object, where: str) -> type[Role]:
    """Return `cls` if it is a usable role.

    Raises:
        ConfigError: not a subclass of `Role`; abstract; a constructor with arguments; no column to read; an invalid
            column or numbered cell to write, or numbered cells of a pool; no `handle`.
    """
    cls = _role_class(cls, where)
    _check_spec(cls, where)
    if issubclass(cls, StatefulRole | ServiceRole):
        return cls
    if not cls.reads and cls.inputs is Role.inputs:
        msg = f"{where}: {cls.__name__} reads no column; set `reads`, e.g. reads = ('trajectory',)"
        raise ConfigError(msg)
    if isinstance(cls.reads, str) or not all(isinstance(name, str) for name in cls.reads):
        msg = f"{where}: {cls.__name__}.reads is {cls.reads!r}; write a tuple of columns, e.g. ('trajectory',)"
        raise ConfigError(msg)
    if cls.writes in cls.reads or cls.writes in END_COLUMNS or cls.writes.startswith(REDELIVERY):
        msg = f"{where}: {cls.__name__} cannot write column {cls.writes!r}; choose a column of its own"
        raise ConfigError(msg)
    if (cls.handle, cls.handle_many, cls.stream) == (Role.handle, Role.handle_many, Role.stream):
        msg = f"{where}: {cls.__name__} defines none of handle, handle_many, stream; define handle(row)"
        raise ConfigError(msg)
    return cls


def _check_spec(cls: type[Role], where: str) -> None:
    """Check the names of the cells and keys that a role writes."""
    spec = cls.spec
    try:
        for column in (cls.writes, *spec.writes):
            if column:
                check_name(column, f"{where}: column")
    except SubjectError as error:
        raise ConfigError(str(error)) from error
    if foreign := [key for key in spec.notes if not key.startswith("note.")]:
        msg = f"{where}: {cls.__name__}.spec.notes names key {foreign[0]!r}; keys of roles begin with 'note.'"
        raise ConfigError(msg)
    if spec.numbered and not issubclass(cls, StatefulRole):
        msg = (
            f"{where}: {cls.__name__}.spec.numbered: a numbered cell has one owner, and this role may have several "
            "actors; derive it from StatefulRole, or remove `numbered`"
        )
        raise ConfigError(msg)
    if not isinstance(spec.numbered, Mapping) or not all(map(_is_kind, spec.numbered.items())):
        msg = (
            f"{where}: {cls.__name__}.spec.numbered is {spec.numbered!r}; give the dataclass of each kind of cells, "
            'e.g. {"audit": Audit}'
        )
        raise ConfigError(msg)
    for kind in spec.numbered:
        try:
            check_kind(kind)
        except SubjectError as error:
            msg = f"{where}: {cls.__name__}.spec.numbered: {error}"
            raise ConfigError(msg) from error
        if kind in ROW_KINDS:
            msg = f"{where}: {cls.__name__}.spec.numbered names {kind!r}, a kind of rows; choose another name"
            raise ConfigError(msg)
