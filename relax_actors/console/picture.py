"""What the cells and the log of a run tell: its ledger, versions, evaluations, figures and events.

Messages are fed in stream order. Any role can write to the log, so what is remembered is bounded, and malformed cells
are ignored.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from broker.codec import decode_fields, open_envelope, verify
from broker.subjects import CellId, RowId, Subjects
from broker.table import Cell
from relax_actors.config.saved import SavedSettings
from relax_actors.console.figures import Figures
from relax_actors.errors import CodecError, SubjectError
from relax_actors.messages import Batch, Checkpoint, Dropped, Evaluation, Quarantined, Weights
from relax_actors.messages.operations import OPERATION, OperationStep
from relax_actors.monitoring.failures import sentence
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.operations import History
from relax_actors.runtime.cells import is_oversized
from relax_actors.training.ledger import RowState, ledger_of

T = TypeVar("T")
NUMBERED: dict[str, type[Any]] = {
    "batch": Batch,
    "checkpoint": Checkpoint,
    "evaluation": Evaluation,
    OPERATION: OperationStep,
}
"""Numbered cells that are decoded when they arrive; of a version of the weights, only its number is needed then."""
MAX_EVENTS, MAX_ACTORS = 2000, 1024
MAX_VERSIONS = 4096
"""Versions of the weights that are kept decoded."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the run.

    Attributes:
        sequence: its sequence in the log.
        time: Unix time in seconds by the broker's clock.
        sender: actor that published it.
        kind: kind of the event.
        text: what happened, in a sentence; empty for an event without one.
        body: its fields.
    """

    sequence: int
    time: float
    sender: str
    kind: str
    text: str
    body: dict[str, Any]


class Picture:
    """State of a run, from its cells and its log."""

    def __init__(self, settings: SavedSettings) -> None:
        self.subjects = Subjects(settings.run.name)
        self.ledger = ledger_of(settings)
        self.figures = Figures(settings.run.steps)
        self.weights: dict[int, Cell] = {}
        """Encoded versions of the weights; see `version`."""
        self._versions: dict[int, Weights] = {}
        self.checkpoints: dict[int, tuple[Checkpoint, float]] = {}
        self.evaluations: dict[int, tuple[Evaluation, float]] = {}
        self.quarantined: dict[RowId, Quarantined] = {}
        self._dropped: dict[RowId, str] = {}
        """Reasons of dropped rows whose steps are not below the floor."""
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.restarts: Counter[str] = Counter()
        """Restarts of each actor since the start of the run, as far as the log goes back."""
        self.actors: dict[str, None] = {}
        """Actors that were ever ready, in the order of their first start."""
        self.states: dict[str, dict[str, float]] = {}
        """Newest figures of the process of each trainer and critic, whose last message is mostly that of a step."""
        self.operations = History()
        self.finished = False
        self.log_sequence = 0

    @staticmethod
    def columns(subjects: Subjects) -> list[str]:
        """Subjects of the cells to feed."""
        rows = [subjects.column(name) for name in ("prompt", "dropped", "quarantined")]
        return [*rows, *(subjects.numbered(kind, "*") for kind in ("weights", *NUMBERED))]

    @staticmethod
    def log_subjects(subjects: Subjects) -> list[str]:
        """Subjects of the messages of the log to feed: events, and figures of steps."""
        figures = [subjects.metric(role, "*") for role in ("trainer", "critic")]
        return [f"{subjects.prefix}.event.>", *figures]

    def take_cell(self, cell: Cell) -> None:
        """Record a cell."""
        try:
            cell_id = self.subjects.parse(cell.subject)
        except SubjectError:
            return
        if is_oversized(cell_id, cell):
            return
        try:
            value = self._value_of(cell_id, cell)
        except CodecError:
            return
        self.ledger.observe(cell_id, value if isinstance(value, Batch | Checkpoint) else None)
        if cell_id.kind == OPERATION:
            self.operations = self.operations.extended([(cell_id.step, value)])
        known: dict[type[Any], dict[int, Any]] = {Checkpoint: self.checkpoints, Evaluation: self.evaluations}
        if (kept := known.get(type(value))) is not None:
            kept[value.version] = (value, cell.stored)
        if isinstance(value, Checkpoint):
            self._dropped = {row: why for row, why in self._dropped.items() if row.step >= self.ledger.floor}
        with suppress(CodecError):
            if cell_id.field == "quarantined":
                self.quarantined[cell_id.row] = _decode(cell, Quarantined)
            elif cell_id.field == "dropped" and cell_id.kind == "group" and cell_id.step >= self.ledger.floor:
                self._dropped[cell_id.row] = _decode(cell, Dropped).reason[:40]

    def _value_of(self, cell_id: CellId, cell: Cell) -> Any:
        """Return a decoded cell; None where its content is not needed now."""
        if cell_id.kind == "weights":
            verify(cell.data, cell.subject)
            self.weights[cell_id.step] = cell
            self._versions.pop(cell_id.step, None)
        expected = NUMBERED.get(cell_id.kind)
        return None if expected is None else _decode(cell, expected, cell.subject)

    def version(self, number: int) -> Weights | None:
        """Return a version of the weights; None if there is none, or if its cell is malformed."""
        if number not in self._versions and number in self.weights:
            try:
                self._versions[number] = _decode(self.weights[number], Weights)
            except CodecError:
                del self.weights[number]
            while len(self._versions) > MAX_VERSIONS:
                del self._versions[next(iter(self._versions))]
        return self._versions.get(number)

    def dropped(self) -> Counter[str]:
        """Return the dropped rows whose steps are not below the floor, by reason, as the ledger counts them."""
        counted = self.ledger.state
        return Counter(reason for row, reason in self._dropped.items() if counted(row) is RowState.DROPPED)

    def take_message(self, cell: Cell) -> None:
        """Record a message of the log; a malformed one, and one that claims to come from another role, is ignored."""
        self.log_sequence = cell.sequence
        message = LogMessage.parse(cell.subject, cell.data)
        if message is None or message.claim:
            return
        self.figures.take(message)
        if not message.is_event:
            if not message.kind and (message.sender in self.states or len(self.states) < MAX_ACTORS):
                self.states[message.sender] = message.numbers()
            return
        if message.kind == "finished":
            self.finished = True
        if len(self.actors) < MAX_ACTORS and message.kind == "ready":
            self.actors.setdefault(message.sender)
        if message.kind == "restarted" and (message.sender in self.restarts or len(self.restarts) < MAX_ACTORS):
            self.restarts[message.sender] += 1
        text = _sentence(message)
        event = Event(cell.sequence, cell.stored, message.sender, message.kind, text, message.body)
        self.events.append(event)


def _decode(cell: Cell, expected: type[T], subject: str | None = None) -> T:
    return decode_fields(open_envelope(cell.data, subject=subject), expected)


def _sentence(message: LogMessage) -> str:
    try:
        return sentence(message)
    except (ValueError, TypeError, KeyError, OverflowError):
        return ""
