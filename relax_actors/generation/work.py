"""How rows become requests and answers become results: the protocol, and rows of one answer each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from relax_actors.errors import RelaxError
from relax_actors.generation.batch import Samples
from relax_actors.runtime import Row


class Work(Protocol):
    """Rows that are generated together. Used from the thread that generates.

    Attributes:
        asks_as_guests: whether the requests of its rows are guests of the batch.
    """

    asks_as_guests: bool

    def __len__(self) -> int:
        """Return the number of rows without a result."""

    def room(self, limit: int) -> int:
        """Return how many further rows may begin, if the engine has room for `limit`."""

    def open(self, rows: Sequence[Row]) -> list[tuple[Row, RelaxError]]:
        """Begin with rows; return those that cannot be generated, with their errors."""

    def exchange(self) -> None:
        """Take what has arrived between two tokens, and ask for what can be generated next; does not wait."""

    def wait(self) -> None:
        """Wait a short time for something to arrive, while nothing can be generated."""

    def results(self) -> list[tuple[Row, Any]]:
        """Remove the rows that are over, and return them with their results."""

    def close(self) -> None:
        """Give up the rows that have no result."""


class SingleTurns:
    """Rows whose samples are one answer each.

    Args:
        generate: asks for the samples of a row.
        finish: returns the result of a row from its samples and the seconds that they took.
    """

    asks_as_guests = False

    def __init__(
        self, generate: Callable[[Row], Future[Samples]], finish: Callable[[Row, Samples, float], Any]
    ) -> None:
        self._generate, self._finish = generate, finish
        self._running: dict[Row, float] = {}
        self._done: list[tuple[Row, Samples]] = []

    def __len__(self) -> int:
        """Return the number of rows without a result."""
        return len(self._running)

    def room(self, limit: int) -> int:
        """Return the room of the engine."""
        return limit

    def open(self, rows: Sequence[Row]) -> list[tuple[Row, RelaxError]]:
        """Ask for the samples of rows."""
        now = time.monotonic()
        for row in rows:
            self._running[row] = now
            self._generate(row).add_done_callback(partial(self._take, row))
        return []

    def _take(self, row: Row, samples: Future[Samples]) -> None:
        if not samples.cancelled() and samples.exception() is None:
            self._done.append((row, samples.result()))

    def exchange(self) -> None:
        """Do nothing: nothing arrives but samples."""

    def wait(self) -> None:
        """Report a defect: rows begin at once, so that there is never anything to wait for."""
        msg = f"{len(self)} rows wait for an engine that generates nothing"
        raise AssertionError(msg)

    def results(self) -> list[tuple[Row, Any]]:
        """Return the rows that have their samples."""
        done, self._done = self._done, []
        now = time.monotonic()
        return [(row, self._finish(row, samples, now - self._running.pop(row))) for row, samples in done]

    def close(self) -> None:
        """Do nothing: an engine that fails forgets its rows."""
