"""Rows of a run, read from its table, or from its record where the table has deleted them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from broker.codec import Resolver
from broker.connection import Connection
from broker.history import History
from broker.store import Store
from broker.subjects import RowId, Subjects
from broker.table import Cell
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import ConfigError, SubjectError
from relax_actors.monitoring.connection import find
from relax_actors.record.record import Record
from relax_actors.record.row_cells import RowCell, RowCells
from relax_actors.record.row_detail import Spell
from relax_actors.runtime.run_folder import RunFolder

_HAS = frozenset({"prompt", "trajectory"})
"""Columns of a row that was not deleted."""


class RowReader:
    """Reads rows as an observer of the run `name`.

    Coroutines run in the loop of the connection that they are given. If `run` is a run on this machine, its record,
    store and tokenizer are used.
    """

    def __init__(self, name: str, run: str) -> None:
        self.subjects = Subjects(name)
        self._folder: RunFolder | None = None
        self._store: Store | None = None
        self.model: Path | None = None
        """Folder of the model's tokenizer; None if it is elsewhere."""
        with suppress(ConfigError):
            self._folder = find(run)
            settings = self._folder.load_settings()
            path = settings.store_path if settings.store_path.exists() else self._folder.root / "store"
            self._store = Store(path) if path.exists() else None
            own = settings.model.path or self._folder.root / "model-config"
            self.model = Path(own) if Path(own).exists() else self._folder.model

    @cached_property
    def record(self) -> Record | None:
        """Record of the run; None if it is on another machine."""
        return None if self._folder is None else Record(self._folder.record)

    @cached_property
    def spell(self) -> Spell | None:
        """Text of a token; None without a tokenizer on this machine."""
        with suppress(ConfigError):
            if self.model is not None:
                token_bytes = Tokenizer(self.model).token_bytes
                return lambda token: token_bytes(token).decode(errors="replace")
        return None

    def resolver(self) -> Resolver | None:
        """Return a function that reads arrays in the store; None if it is on another machine."""
        return None if self._store is None else self._store.reader()

    def stored(self, uri: str) -> Path | None:
        """Return the path of a store's file if it is here; raises StoreError if outside."""
        return None if self._store is None else self._store.path(uri)

    async def row(self, connection: Connection, row: RowId) -> RowCells | None:
        """Return a row, from the table or else from the record; None if neither has it.

        Raises:
            BrokerError: the broker does not answer.
            RecordError: the record's frame of the row is damaged.
        """
        cells = (await self.cells(connection, f"{self.subjects.prefix}.{row}.>")).get(row, [])
        from_table = RowCells(row, cells, self.resolver())
        if _HAS & set(from_table.cells):
            return from_table
        kept = None if self.record is None else self.record.row(row)
        # The table keeps the cells that end a row.
        return kept or (from_table if cells else None)

    async def step(self, connection: Connection, kind: str, step: int) -> dict[RowId, list[RowCell]]:
        """Return the cells that the table has of the rows of a step, or of an evaluated version."""
        return await self.cells(connection, f"{self.subjects.prefix}.{kind}.{step}.>")

    async def cells(self, connection: Connection, subject: str) -> dict[RowId, list[RowCell]]:
        """Return all stored cells of rows that a filter matches."""
        by_row: defaultdict[RowId, list[RowCell]] = defaultdict(list)
        for cell in await self.read(connection, subject):
            place = self.subjects.parse(cell.subject)
            by_row[place.row].append(RowCell(place.field, cell.sequence, cell.stored, cell.data))
        return dict(by_row)

    async def read(self, connection: Connection, subject: str) -> list[Cell]:
        """Return all stored cells that a filter matches; a subject that names no cell is left out."""
        return [cell async for cell in self.each(connection, subject)]

    async def each(self, connection: Connection, subject: str) -> AsyncIterator[Cell]:
        """Yield what `read` returns, of which a page is in memory at a time."""
        history = History(connection, self.subjects.table_stream, subject)
        while page := await history.page():
            for cell in page:
                with suppress(SubjectError):
                    self.subjects.parse(cell.subject)
                    yield cell
