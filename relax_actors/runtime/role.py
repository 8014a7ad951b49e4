"""The base class of every role: declared columns in, one column out.

A user's role is a subclass of `Role` with `reads`, `writes` and `handle(row)`. Annotated attributes are its options,
set from `[roles.<name>]` and checked by pydantic. An instance lives in one thread of one process; the same row may be
handled again after a crash, so `handle` should depend on the row alone.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import pydantic

from broker.codec import decode_fields, open_envelope, plain_value
from broker.leases import RunState
from broker.store import Store, raise_it
from broker.subjects import CellId, RowId, check_name
from broker.table import CALL_DEADLINE, Cell, Table
from relax_actors import messages
from relax_actors.config import Config
from relax_actors.errors import CodecError, ConfigError, FencedError, StoreFullError, SubjectError
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder

COLUMNS: dict[str, type] = {
    "prompt": messages.Prompt,
    "trajectory": messages.Trajectory,
    "reward": messages.Reward,
    "advantage": messages.Advantage,
    "dropped": messages.Dropped,
    "quarantined": messages.Quarantined,
    "requeued": messages.Requeued,
    "readmitted": messages.Readmitted,
}

# Columns about a row's end, which no role of a user's may write.
ENDS = ("dropped", "quarantined", "requeued", "readmitted")


@dataclass(frozen=True, slots=True)
class Drop:
    """Returned by `handle`: the row leaves the run untrained, and is replaced."""

    reason: str
    detail: str = ""


class Row:
    """The columns that a role reads of one row: `row.trajectory`, `row.reward`, ...

    Columns of built-in roles are the dataclasses of `relax_actors.messages`; a column of another role is the plain data
    or the arrays that its `handle` returned. Each is decoded when first used.
    """

    __slots__ = ("_cells", "_store", "_values", "id")

    def __init__(self, row: RowId, cells: dict[str, bytes], store: Store) -> None:
        self.id = row
        self._cells = cells
        self._store = store
        self._values: dict[str, Any] = {}

    @property
    def is_eval(self) -> bool:
        """Whether it is a held-out row."""
        return self.id.kind == "eval"

    def column(self, name: str) -> Any:
        """A column by name.

        Raises:
            KeyError: the role does not read it.
            CodecError: the cell is malformed.
            StoreError: an array of it is missing or corrupt.
        """
        if name not in self._values:
            data = self._cells[name]
            envelope = open_envelope(data, self._store.reader())
            expected = COLUMNS.get(name)
            self._values[name] = decode_fields(envelope, expected) if expected else plain_value(envelope)
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._cells:
            msg = f"row {self.id} has no column {name!r} here; the role reads {sorted(self._cells)}: add it to `reads`"
            raise AttributeError(msg)
        return self.column(name)


Results: TypeAlias = Sequence[tuple[Row, Any]]
"""Rows, each with its value, a `Drop`, or the error that it failed with."""
More: TypeAlias = Callable[[int], Sequence[Row]]
"""Gives rows that came meanwhile, at most as many as asked for."""


@dataclass
class Context:
    """What an actor has around it."""

    config: Config
    folder: RunFolder
    role: str
    n: int
    incarnation: int
    table: Table
    state: RunState
    journal: Journal
    stopping: Callable[[], bool] = field(default=lambda: False)
    progress: Callable[[], None] = field(default=lambda: None)
    waits_for: Callable[[str], None] = field(default=lambda _: None)
    wait_for_room: Callable[[StoreFullError], None] = raise_it
    """What to do when the disk is full: it waits a while, or raises the error."""
    turn: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context in which the actor may compute: where roles share a device, it waits for its turn."""

    @property
    def author(self) -> str:
        """This life of the actor, as it signs its cells."""
        return f"{self.role}.{self.n}#{self.incarnation}"

    async def give_way_async(self) -> None:
        """End this life if a later one of the same actor has begun: it was stopped, and taken for dead.

        Raises:
            FencedError: one has.
        """
        lives = await self.state.lives(self.role, self.n)
        if lives > self.incarnation:
            msg = f"incarnation {lives} of {self.role}.{self.n} has begun; this is {self.incarnation}, which gives way"
            raise FencedError(msg)

    def give_way(self) -> None:
        """As `give_way_async`, from the role's thread."""
        self.table.bridge.call(self.give_way_async(), CALL_DEADLINE)


class Role:
    """A function from columns to a column, run by an actor.

    Class attributes:
        reads: columns that `handle` gets; it is called when all of them are there.
        writes: the column that it fills; empty for a role that only looks on.
        kinds: `("group",)` for training rows, `("group", "eval")` for held-out rows too.
        max_concurrent_rows: see `together`.
        linger: seconds that more rows are waited for when there is one.
        ahead: whether the next rows are taken while some are handled; not if those take so long that another actor
            of the role could begin with the next ones earlier.
        spec: permissions and place in a run; only a `StatefulRole` needs one, which lists the cells that it writes.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ("group",)
    max_concurrent_rows: ClassVar[int] = 1
    linger: float = 0.0
    ahead: ClassVar[bool] = True
    spec: ClassVar[RoleSpec] = RoleSpec()

    context: Context

    def setup(self) -> None:
        """Called once, in the actor's thread, before the first row: load what is slow to load."""

    def inputs(self) -> tuple[str, ...]:
        """The columns to read; `reads` unless options say otherwise."""
        return self.reads

    def handle(self, row: Row) -> Any:
        """Give the row's value in column `writes`, or `Drop(...)`, or raise `RowError` if its data is bad.

        Any other exception counts as a failure of the row; after `supervision.max_failures` it is quarantined.
        """
        raise NotImplementedError

    def handle_many(self, rows: Sequence[Row]) -> list[Any]:
        """Handle up to `together()` rows at once; one value a row, in order."""
        return [self.handle(row) for row in rows]

    def stream(self, rows: Sequence[Row], more: More) -> Iterator[Results]:
        """Handle rows, and give each with its value as soon as that is there; all at once unless a role knows better.

        A role that takes long, over rows that end at different times, may ask `more` for as many as it has room for.
        The last rows are written when it has come to its end, or asks for more.
        """
        del more
        values = self.handle_many(rows)
        if len(values) != len(rows):
            msg = f"{type(self).__name__}.handle_many gave {len(values)} values for {len(rows)} rows"
            raise ValueError(msg)
        yield list(zip(rows, values, strict=True))

    def together(self) -> int:
        """How many rows are handled at once, at most."""
        return self.max_concurrent_rows

    def progress(self) -> None:
        """Say that long work goes on; without it an actor is taken for hung after its `deadline`."""
        self.context.progress()

    def metrics(self) -> dict[str, float]:
        """Numbers to publish with the actor's own, about once a second."""
        return {}

    def close(self) -> None:
        """Called once at an orderly end."""

    @classmethod
    def options(cls) -> dict[str, tuple[Any, Any]]:
        """The class's options: name -> (type, default), from its annotated attributes."""
        hints = typing.get_type_hints(cls)
        reserved = typing.get_type_hints(Role).keys()
        return {
            name: (hint, getattr(cls, name, ...))
            for name, hint in hints.items()
            if name not in reserved and not name.startswith("_") and typing.get_origin(hint) is not ClassVar
        }

    @classmethod
    def build(cls, given: dict[str, Any], where: str) -> Role:
        """Make an instance with its options set.

        Raises:
            ConfigError: an unknown option, or one of the wrong type.
        """
        fields: dict[str, Any] = dict(cls.options())
        strict = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        model = pydantic.create_model(cls.__name__, __config__=strict, **fields)
        try:
            values = model(**given)
        except pydantic.ValidationError as error:
            lines = [
                f"{where}.{'.'.join(map(str, e['loc']))}: {e['msg']}; {cls.__name__} takes {sorted(fields)}"
                for e in error.errors()
            ]
            raise ConfigError("\n".join(lines)) from error
        role = cls()
        for name in fields:
            setattr(role, name, getattr(values, name))
        return role


class StatefulRole(Role):
    """A role that owns state and rebuilds it from the table: it follows columns in the order of the stream.

    Only one actor of it acts at a time: its writes are fenced by its incarnation.
    """

    def follows(self) -> list[str]:
        """Subjects to follow, all of them from the start."""
        raise NotImplementedError

    def recover(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Called once with all cells that were there when the actor started."""
        raise NotImplementedError

    def on_cells(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Called with the cells that came since, in order."""
        raise NotImplementedError

    def idle(self) -> None:
        """Called about twice a second while nothing comes."""


def check_role(cls: object, where: str) -> type[Role]:
    """Return `cls` if it is a usable role.

    Raises:
        ConfigError: it is none, or reads or writes nothing sensible.
    """
    if not (isinstance(cls, type) and issubclass(cls, Role)):
        msg = f"{where} names {cls!r}, which is no subclass of relax_actors.Role"
        raise ConfigError(msg)
    if issubclass(cls, StatefulRole):
        return cls
    if not cls.reads and cls.inputs is Role.inputs:
        msg = f"{where}: {cls.__name__} reads no column; set `reads`, e.g. reads = ('trajectory',)"
        raise ConfigError(msg)
    if isinstance(cls.reads, str) or not all(isinstance(name, str) for name in cls.reads):
        msg = f"{where}: {cls.__name__}.reads is {cls.reads!r}; write a tuple of columns, e.g. ('trajectory',)"
        raise ConfigError(msg)
    if cls.writes:
        try:
            check_name(cls.writes, f"{where}: column")
        except SubjectError as error:
            raise ConfigError(str(error)) from error
    if cls.writes in cls.reads or cls.writes in ENDS:
        msg = f"{where}: {cls.__name__} writes {cls.writes!r}, which it cannot; choose a column of its own"
        raise ConfigError(msg)
    if (cls.handle, cls.handle_many, cls.stream) == (Role.handle, Role.handle_many, Role.stream):
        msg = f"{where}: {cls.__name__} has no handle(row)"
        raise ConfigError(msg)
    return cls


__all__ = ["COLUMNS", "CodecError", "Context", "Drop", "Role", "Row", "StatefulRole", "check_role"]
