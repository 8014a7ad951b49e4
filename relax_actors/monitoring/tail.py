"""Messages of a subject, printed one a line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import suppress

from broker.history import History
from broker.subjects import Subjects
from broker.table import Cell
from relax_actors.errors import ConfigError
from relax_actors.monitoring.access import Access
from relax_actors.monitoring.connection import Observed, observed
from relax_actors.monitoring.render import readable
from relax_actors.printable import printable

FOREVER = 1e9
POLL_SECONDS = 0.25


class _RunOverError(Exception):
    """A run has ended while its messages were followed."""


def print_messages(subject: str, run: str | None, access: Access, *, history: bool, count: int) -> None:
    """Print a subject's stored messages until interrupted, or the run's end.

    With `history` it starts with the stored messages instead of the next one; it returns after `count` messages, if not
    0.

    Raises:
        ConfigError: no such run, or the run is not up and `history` is False.
    """

    async def show(at: Observed) -> None:
        printed = 0
        async for message in _messages(at, subject, history=history):
            sys.stdout.write(printable(f"{message.subject} {readable(message.data)}") + "\n")
            sys.stdout.flush()
            printed += 1
            if printed == count:
                return

    with observed(run or run_of(subject), access) as at:
        if not at.live and not history:
            msg = f"run {at.run} is not up and publishes nothing; --history prints the stored messages"
            raise ConfigError(msg)

        def end_with_run() -> None:
            if at.is_over():
                raise _RunOverError

        at.connection.on_wait = end_with_run
        with suppress(KeyboardInterrupt, _RunOverError):
            at.connection.call(show(at), FOREVER)


async def _messages(at: Observed, subject: str, *, history: bool) -> AsyncIterator[Cell]:
    """Yield a subject's stored messages, if wanted, then live ones."""
    readers = [History(at.connection, stream, subject) for stream in _streams(Subjects(at.run), subject)]
    if not history:
        for reader in readers:
            await reader.skip()
    while True:
        pages = [await reader.page() for reader in readers]
        for message in (message for page in pages for message in page):
            yield message
        if not any(pages):
            if not at.live:
                return
            await asyncio.sleep(POLL_SECONDS)


def _streams(subjects: Subjects, subject: str) -> list[str]:
    """Streams that store a subject."""
    kind = [*subject.split("."), ">", ">"][2]
    if kind in ("event", "metric"):
        return [subjects.log_stream]
    return [subjects.table_stream, subjects.log_stream] if kind in ("*", ">") else [subjects.table_stream]


def run_of(subject: str) -> str:
    """Return the run that a subject names; raises ConfigError if the subject names no run."""
    parts = subject.split(".")
    if len(parts) < 3 or parts[0] != "relax" or parts[1] in ("*", ">"):  # noqa: PLR2004
        msg = f"subject {subject!r} names no run; write e.g. relax.<run>.event.>, or give --run"
        raise ConfigError(msg)
    return parts[1]
