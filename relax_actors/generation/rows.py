"""Rows of a rollout: waiting rows by what a batch has in common, and the running batch."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeAlias

from relax_actors.errors import RelaxError, StoreError
from relax_actors.generation.batch import Samples
from relax_actors.generation.policy import Policy
from relax_actors.generation.sampling import Sampling
from relax_actors.runtime import More, Results, Row


class Work(Protocol):
    """Rows that are generated together. Used from the thread that generates.

    Attributes:
        uses_service: whether the requests of its rows are service requests of the batch.
    """

    uses_service: bool

    def __len__(self) -> int:
        """Return the number of rows without a result."""

    def room(self, limit: int) -> int:
        """Return how many further rows may begin, if the engine has room for `limit`."""

    def open(self, rows: Sequence[Row]) -> list[tuple[Row, RelaxError]]:
        """Begin with rows; return those that cannot be generated, with their errors."""

    def exchange(self) -> None:
        """Take what has arrived between two tokens, and request further turns; never waits."""

    def wait(self) -> None:
        """Wait a short time for something to arrive, while nothing can be generated."""

    def results(self) -> list[tuple[Row, Any]]:
        """Remove the rows that are over, and return them with their results."""

    def close(self) -> None:
        """Give up the rows that have no result."""


class SingleTurns:
    """Rows whose samples are one answer each.

    `generate` asks for the samples of a row; `finish` returns its result from them and the seconds that they took.
    """

    uses_service = False

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


BatchKey: TypeAlias = tuple[int | None, Sampling]
"""What rows of one batch have in common: the exact version they require, or None; how their samples are drawn."""
Errors: TypeAlias = list[tuple[Row, RelaxError]]
"""Rows that cannot be generated, with their errors."""


class Rows:
    """Generates rows in batches of one key after another. Used from the thread that generates.

    No row joins a batch of an exact version. No row joins while rows of another key wait, or while newer weights are
    staged and in-flight updates are off: the batch then drains, so that neither is starved.

    Args:
        policy: generates.
        make_work: returns the `Work` for rows whose samples are drawn in one way.
        sampling: returns how the samples of a row are drawn; raises `RelaxError` if that is unknown.
        check: raises `RelaxError` if a row cannot be generated.
        more: takes further rows that have arrived.
        limit: rows that are generated at once.
        progress: reports that the actor is alive while it waits.
    """

    def __init__(
        self,
        policy: Policy,
        make_work: Callable[[Sampling], Work],
        sampling: Callable[[Row], Sampling],
        check: Callable[[Row], None],
        more: More,
        limit: int,
        progress: Callable[[], None],
    ) -> None:
        self._policy, self._make_work, self._sampling, self._check = policy, make_work, sampling, check
        self._more, self._limit, self._progress = more, limit, progress
        self._waiting: defaultdict[BatchKey, list[Row]] = defaultdict(list)
        self._bad: Errors = []

    def generate(self, rows: Sequence[Row]) -> Iterator[Results]:
        """Generate rows, and rows that join them; yield each row as soon as it is finished.

        Raises:
            RowError: a row requires weights newer than any published version. PromptSource admits a row only after the
                weights that it requires are published, so the row itself is wrong.
            ActorError: the required weights are published but cannot be read.
        """
        self._add(rows)
        yield self._take_bad()
        while self._waiting:
            yield from self._generate_batch(next(iter(self._waiting)))

    def _add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            try:
                self._check(row)
                sampling = self._sampling(row)
            except RelaxError as error:
                self._bad.append((row, error))
                continue
            prompt = row.prompt
            self._waiting[prompt.min_version if prompt.exact_version else None, sampling].append(row)

    def _take_bad(self) -> Errors:
        bad, self._bad = self._bad, []
        return bad

    def _generate_batch(self, key: BatchKey) -> Iterator[Results]:
        """Generate the waiting rows of a key, and matching rows that arrive later."""
        first, (version, sampling) = self._waiting.pop(key), key
        if version is None:
            self._policy.stager.use_newest(max(row.prompt.min_version for row in first))
        elif not self._policy.stager.try_use_version(version):
            yield [(row, StoreError(f"weights {version} are gone")) for row in first]
            return
        work = self._make_work(sampling)
        try:
            self._bad += work.open(first)
            for _ in self._advance(work, key):
                yield [*work.results(), *self._take_bad()]
            yield self._take_bad()  # of rows that came with the last token
        finally:
            self._policy.give_up()
            work.close()

    def _advance(self, work: Work, key: BatchKey) -> Iterator[None]:
        """Generate until no row is without a result; yield whenever there may be results."""
        version, _ = key
        yield
        while len(work):
            self._let_weights_in(work, key)
            ran = False
            for _ in self._policy.run(
                version, lambda limit: self._let_rows_join(work, key, limit), lambda: self._admits(work, key)
            ):
                ran = True
                yield
            if not len(work):
                return
            if not ran:
                work.wait()
                self._progress()
            self._let_rows_join(work, key, self._limit)
            yield

    def _let_weights_in(self, work: Work, key: BatchKey) -> None:
        """Swap to newer weights while nothing runs, and begin rows that need them.

        A sample has one version, unless updates are in flight or an agent takes its time.
        """
        version, _ = key
        if version is None and work.uses_service:
            late = self._waiting.pop(key, [])
            self._policy.stager.use_newest(max((row.prompt.min_version for row in late), default=0))
            self._bad += work.open(late)
        elif (refresh := self._policy.refresh_of(version)) is not None:
            refresh()

    def _admits(self, work: Work, key: BatchKey) -> bool:
        """Whether service requests may begin in the running batch of a key."""
        if work.uses_service:
            return key not in self._waiting and not self._policy.waits_for_weights(key[0])
        return bool(len(work)) and not self._drains(key)

    def _let_rows_join(self, work: Work, key: BatchKey, limit: int) -> None:
        """Take what has arrived between two tokens, and let rows join the running batch of a key."""
        work.exchange()
        if self._drains(key):
            return
        if not self._waiting:
            self._add(self._more(work.room(limit)))
        serving = self._policy.stager.serving
        current, arrived = -1 if serving is None else serving.version, self._waiting.pop(key, [])
        if too_new := [row for row in arrived if row.prompt.min_version > current]:
            self._waiting[key] = too_new
        if joining := [row for row in arrived if row.prompt.min_version <= current]:
            self._bad += work.open(joining)

    def _drains(self, key: BatchKey) -> bool:
        """Whether the running batch of a key is closed, so that other rows or newer weights follow."""
        version, _ = key
        waits = self._policy.refresh_of(version) is None and (self._waiting or self._policy.stager.has_newer)
        return version is not None or bool(waits) or any(other != key for other in self._waiting)
