"""Base class of every role: a function from columns to one column.

A user's role is a subclass of `Role` with `reads`, `writes` and `handle(row)`:

    class LengthPenalty(Role):
        reads = ("trajectory",)
        writes = "length_penalty"
        scale: float = 0.01  # option `scale` of [roles.length_penalty]

        def handle(self, row):
            return [-self.scale * len(text) for text in row.trajectory.texts]

Invariant: a row may be handled more than once, since an actor can be killed before its result is written. `handle` must
depend on the row and the run's seed alone; the table refuses the second write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from relax_actors.config import Config
from relax_actors.data.checked_run import CheckedRun
from relax_actors.registry.options import build, options_of
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime.context import Context
from relax_actors.runtime.row import Row


@dataclass(frozen=True, slots=True)
class Drop:
    """Return value of `Role.handle` that drops the row, which is then replaced.

    Attributes:
        reason: short name of the reason, counted by the ledger and the monitors.
        detail: text for the event `row_dropped`.
    """

    reason: str
    detail: str = ""


Results: TypeAlias = Sequence[tuple[Row, Any]]
"""Rows with their outcome: the value to write, a `Drop`, or the exception that the row failed with."""
More: TypeAlias = Callable[[int], Sequence[Row]]
"""Take up to so many further rows that have arrived meanwhile; returns at once, perhaps with none."""


class Role:
    """Function from columns to a column, run by an actor.

    An instance belongs to one process. `setup`, `handle`, `handle_many`, `stream` and `close` run in one thread, the
    role's thread, one call at a time. `inputs`, `row_limit` and `metrics` run in the event loop's thread and must not
    block.

    Annotated class attributes of a subclass are its options: they are set from `[roles.<name>]` before `setup` and
    checked by pydantic. Attributes whose names begin with an underscore, and `ClassVar`s, are no options.

    Attributes:
        reads: columns that the role reads. A row is handled as soon as all of them are written.
        writes: column that the role writes; empty for a role that only observes.
        kinds: kinds of rows: `("group",)` for training rows, `("group", "eval")` for held-out rows too.
        max_concurrent_rows: rows handled at once, at most, unless `row_limit` is overridden.
        batch_wait: seconds to wait for further rows after the first one, to fill a batch.
        isolates_suspects: whether a row that may have killed an actor is handled alone.
        prefetch: whether the actor fetches its next rows while it handles some. Set it to False where a row takes so
            long that an idle actor of the pool should get it instead.
        spec: permissions and place in a run. Only a `StatefulRole` needs one, which lists the cells that it writes
            besides the column `writes`.
        context: the actor's surroundings; available from `setup` on.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ("group",)
    max_concurrent_rows: ClassVar[int] = 1
    batch_wait: float = 0.0
    prefetch: ClassVar[bool] = True
    isolates_suspects: ClassVar[bool] = True
    spec: ClassVar[RoleSpec] = RoleSpec()

    context: Context

    def check(self, run: CheckedRun) -> Iterator[str]:  # noqa: ARG002 subclasses use it
        """Check what the role needs, without `context`; for `relax check` and `relax up`.

        It imports no engine. It looks for what an actor needs on its machine only if `run.here` has the role.

        Yields:
            Notes for the user.

        Raises:
            ConfigError: the role cannot work in this run, or on this machine.
        """
        yield from ()

    def setup(self) -> None:
        """Prepare the actor, e.g. load a model; called once in the role's thread, before rows.

        An exception ends the process, and the supervisor restarts it. `supervision.start_deadline` bounds the time.
        """

    def inputs(self, config: Config) -> tuple[str, ...]:  # noqa: ARG002 subclasses use it
        """Return the columns to read: `reads`, unless options or the configuration change them.

        Called also without `context` and `setup`, by `relax check` and by the process that creates the run's consumers.
        """
        return self.reads

    def handle(self, row: Row) -> Any:
        """Compute the row's value in column `writes`. Called in the role's thread.

        Override `handle`, `handle_many` or `stream`.

        Args:
            row: the row, with the columns that the role reads.

        Returns:
            A dataclass of `relax_actors.messages`, or plain data: None, bool, int, float, str, bytes, list, tuple,
            dict with string keys, NumPy arrays, nested as needed. Or a `Drop`, which ends the row. The value is
            ignored if `writes` is empty.

        Raises:
            RowError: the row's data is bad; the row is quarantined at once.
            StoreError: an array of the row is lost; the row is dropped as `lost_segment`.
            ActorError, BrokerError, ConfigError, StoreFullError: not the row's fault; the process ends, and the row is
                handled again by the next incarnation.
            Exception: any other counts as a failure of the row. It is retried, and quarantined after
                `supervision.max_failures` failures.
        """
        raise NotImplementedError

    def handle_many(self, rows: Sequence[Row]) -> list[Any]:
        """Handle a batch of up to `row_limit()` rows. Called in the role's thread.

        If it raises, each row of the batch is handled again alone, so that one bad row fails alone.

        Returns:
            One value a row, in the order of `rows`; see `handle`. A value may be an exception, which counts for its
            row only.
        """
        return [self.handle(row) for row in rows]

    def stream(self, rows: Sequence[Row], more: More) -> Iterator[Results]:
        """Handle rows and yield each result as soon as it is available. Called in the role's thread.

        The default yields the results of `handle_many` at once. Override it where rows end at different times, as in
        generation: a result is written when the next one is yielded, when `more` is called, or at the end.

        Args:
            rows: rows to begin with, at most `row_limit()`.
            more: call it with the number of free places to take further rows in.

        Yields:
            Rows with their results. Every row must get one before the iterator ends; a row without one has failed.
        """
        del more
        values = self.handle_many(rows)
        if len(values) != len(rows):
            msg = f"{type(self).__name__}.handle_many returned {len(values)} values for {len(rows)} rows"
            raise ValueError(msg)
        yield list(zip(rows, values, strict=True))

    def serve(self, until: Callable[[], bool]) -> None:
        """Do work that belongs to no row, such as requests; called in the role's thread.

        An actor of a pool calls it after `context.wake()` while no row is handled.

        Args:
            until: whether rows wait; the role should then begin nothing new, and return.
        """

    def row_limit(self) -> int:
        """Return how many rows are handled at once, at most. Called once, after `setup`."""
        return self.max_concurrent_rows

    def progress(self) -> None:
        """Report progress, from the role's thread, during long work.

        An actor that reports none for its `deadline` (seconds, in `[roles.<name>]`) while it handles rows is killed as
        hung. Waiting for the broker and for a shared device counts as progress.
        """
        self.context.progress()

    def metrics(self) -> dict[str, float]:
        """Return further metrics of the actor; called every second in the event loop's thread.

        It runs while a row is being handled, so it should only read attributes. An exception is logged and ignored.
        """
        return {}

    def has_worked(self, handled: int) -> bool:
        """Return whether the code has shown that it works, so that a replacement of it may go on.

        Called every second in the event loop's thread.

        Args:
            handled: rows, cells or requests that this incarnation has handled, without the history of a stateful role.
        """
        return handled > 0

    def weights_version(self) -> int | None:
        """Return the verified version that the actor holds, -1 before the first; or None.

        Called every second in the event loop's thread, while rows are handled.
        """
        return None

    def close(self) -> None:
        """Release resources; called once in the role's thread at an orderly end."""

    @classmethod
    def options(cls) -> dict[str, tuple[Any, Any]]:
        """Return the options of the class: name -> (type, default), from its annotated attributes."""
        return options_of(cls, Role)

    @classmethod
    def build(cls, given: dict[str, Any], where: str) -> Role:
        """Create an instance with options; raises ConfigError for bad ones."""
        return build(cls, Role, given, where, "setup")
