"""Where the console begins to read the table of a long run: the first view needs little of what a checkpoint covers."""

from __future__ import annotations

from dataclasses import dataclass

from broker.codec import decode_fields, open_envelope
from broker.connection import Connection
from broker.history import History
from broker.lookups import look_up_all
from broker.subjects import Subjects
from broker.table import Cell
from relax_actors.errors import CodecError
from relax_actors.messages import Checkpoint

RECENT_STEPS = 256
"""Steps below the floor whose batches and weights are read at once: they give the rate of a run."""


@dataclass(frozen=True, slots=True)
class TableStart:
    """Where to begin.

    Attributes:
        cells: cells to take first: the weights of the floor, and the first batch.
        sequences: sequence from which the cells of a subject are read; others are read from the start.
        floor: floor of the newest checkpoint.
        trained: rows that the steps below it trained.
    """

    cells: list[Cell]
    sequences: dict[str, int]
    floor: int
    trained: int


async def find_start(connection: Connection, subjects: Subjects) -> TableStart | None:
    """Return where to begin; None if everything is to be read, as of a short run. Runs in the connection's loop.

    Raises:
        BrokerError: the broker refuses the request.
        UnreadableAnswerError, nats.errors.Error: as of `look_up_all`.
    """
    stream = subjects.table_stream
    newest = await History(connection, stream, subjects.numbered("checkpoint", "*")).last()
    if newest is None:
        return None
    try:
        checkpoint = decode_fields(open_envelope(newest.data, subject=newest.subject), Checkpoint)
    except CodecError:
        return None
    floor, first = checkpoint.floor, checkpoint.floor - RECENT_STEPS
    if first <= 0:
        return None
    taken = [subjects.numbered("weights", floor), subjects.numbered("batch", 0)]
    begins = {subjects.numbered(kind, "*"): subjects.numbered(kind, first) for kind in ("batch", "weights")}
    stored = await look_up_all(connection.requests, stream, [*taken, *begins.values()])
    if len(stored) < len(taken) + len(begins):
        return None
    # Without times: the weights are read again before the first answer, and nothing shows the time of a batch's cell.
    cells = [Cell(subject, stored[subject].sequence, stored[subject].data) for subject in taken]
    sequences = {every: stored[subject].sequence for every, subject in begins.items()}
    return TableStart(cells, sequences, floor, checkpoint.totals.trained)


class OlderCells:
    """Cells of the table before its `TableStart`, page by page. All coroutines run in the connection's loop."""

    def __init__(self, connection: Connection, stream: str, start: TableStart) -> None:
        self._parts = [(History(connection, stream, every), end) for every, end in start.sequences.items()]

    async def page(self) -> list[Cell]:
        """Return the next cells, in the order of each subject; empty after the last.

        Raises:
            BrokerError: the broker refuses the request.
        """
        while self._parts:
            history, end = self._parts[0]
            page = await history.page()
            if not page or page[-1].sequence >= end:
                self._parts.pop(0)
            if older := [cell for cell in page if cell.sequence < end]:
                return older
        return []
