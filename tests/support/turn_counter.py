"""Counts the turns that a run writes down, while its processes are killed."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress

import nats.errors

from broker.address import Address
from broker.connection import Connection
from broker.store import Store
from broker.subjects import Subjects
from broker.table import Table
from relax_actors.errors import RelaxError
from relax_actors.messages import SessionLog
from tests.support.running import Run

POLL_SECONDS = 0.25
TurnKey = tuple[str, int, int, int]
"""Row, sample, attempt of the sample, number of the turn."""


class TurnCounter:
    """Reads the turn cells of a run until `close`; in how many cells each turn stands.

    Attributes:
        cells: subjects of the cells that were read.
        turns: number of cells that hold a turn.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._closing = run, threading.Event()
        self.cells: set[str] = set()
        self.turns: Counter[TurnKey] = Counter()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading."""
        self._closing.set()
        self._thread.join(30)

    @property
    def twice(self) -> list[TurnKey]:
        """Turns that stand in more than one cell: they were generated again although they were written."""
        return sorted(key for key, count in self.turns.items() if count > 1)

    def _watch(self) -> None:
        while not self._closing.is_set():
            with suppress(RelaxError, OSError, nats.errors.Error):
                address = Address.load(self._run.folder.address).for_user("operator")
                connection = Connection(address, "counter", deadline=2.0)
                try:
                    self._read(connection)
                finally:
                    connection.close()
            self._closing.wait(POLL_SECONDS)

    def _read(self, connection: Connection) -> None:
        subjects = Subjects(self._run.name)
        table = Table(connection, subjects, Store(self._run.folder.root / "store"), "test")
        while not self._closing.wait(POLL_SECONDS):
            for subject in set(table.list_subjects(subjects.turns("group"))) - self.cells:
                cell = table.get(subject)
                if cell is None:
                    continue
                self.cells.add(subject)
                row = str(subjects.parse(subject).row)
                for turn in table.read(cell.data, SessionLog).turns:
                    self.turns[row, turn.sample, turn.attempt, turn.number] += 1
