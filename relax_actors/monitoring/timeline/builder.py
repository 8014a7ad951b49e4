"""Builds a timeline from cells and from messages of the log, in any order. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress

from broker.codec import open_envelope
from broker.errors import CodecError
from broker.subjects import CellId, RowId
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.monitoring.timeline.span import Instant, Span, Timeline
from relax_actors.printable import printable

AFTER: Mapping[str, tuple[str, ...]] = {"media": ("prompt",), "trajectory": ("media", "prompt")}
"""Columns of which the first that a row has is what a column waited for; scores wait for the trajectory."""
SCORES = frozenset({"reward", "reference", "actor_fwd", "squares", "values", "teacher", "reward_model", "judge"})
"""Columns that are computed from the trajectory, beside each other."""
SHOWN = frozenset(
    {
        *("crashed", "down", "gave_up", "stopped", "fault", "recovered", "resuming", "row_quarantined", "row_dropped"),
        *(
            "row_lost",
            "row_failed",
            "table_full",
            "waiting_for_room",
            "weights_corrupt",
            "replay_diverged",
            "finished",
            "profiled",
        ),
    }
)
"""Kinds of events that are shown as instants."""
STARTS = ("started", "ready")
MOST_FILES = 1024
"""Files of an event that are listed: a profile of a trainer has one for each rank."""
LONGEST_NAME = 100
"""Characters of the name of a file; longer names are no profile's, and are left out."""
Cells = dict[str, tuple[float, str]]
"""When each cell of a row was stored, and its author, by column."""


class Builder:
    """Collects cells and messages."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._rows: defaultdict[str, Cells] = defaultdict(dict)
        self._numbered: dict[tuple[str, int], tuple[float, str]] = {}
        self._steps: dict[int, dict[str, float]] = {}
        self._starts: list[tuple[float, str, str]] = []
        self._instants: list[Instant] = []
        self._turns: list[Span] = []
        self._ends: dict[tuple[str, int], float] = {}

    def take_cell(self, cell: CellId, stored: float, data: bytes) -> None:
        """Record a cell; one that does not decode has no author and is left out."""
        with suppress(CodecError):
            author = printable(open_envelope(data).author.partition("#")[0][:80])
            if cell.kind in ("group", "eval"):
                self._rows[str(cell.row)].setdefault(cell.field, (stored, author))
            else:
                self._numbered.setdefault((cell.kind, cell.step), (stored, author))

    def take_turn(
        self, row: RowId, place: tuple[int, int, int], begun: float, stored: float, facts: Mapping[str, str | int]
    ) -> None:
        """Record a turn of a sample of a row, on a lane of the sample.

        `place` is the index of the sample, the attempt of its episode, and the number of the turn in the attempt. The
        first turn could begin when the row was admitted, at `begun`.
        """
        sample, attempt, number = place
        begin = self._ends.get((str(row), sample), begun)
        self._ends[str(row), sample] = stored
        if begin <= stored:
            name = f"turn {number} of attempt {attempt}" if attempt else f"turn {number}"
            self._turns.append(Span(name, begin, stored, f"sample.{sample}", str(row), row.step, dict(facts)))

    def take_message(self, message: LogMessage, stored: float) -> None:
        """Record a message of the log; ignores what no timeline shows, and false claims."""
        if message.claim:
            return
        if not message.is_event:
            if message.kind == "step":
                figures = message.numbers()
                self._steps.setdefault(int(figures.get("step", -1)), figures)
            return
        if message.kind in STARTS:
            self._starts.append((stored, message.kind, message.sender))
        elif message.kind in SHOWN:
            self._instants.append(Instant(message.kind, stored, message.sender, printable(_detail(message.body))))

    def timeline(self) -> Timeline:
        """Return what was recorded."""
        spans = [*self._turns, *self._of_rows(), *self._of_steps(), *self._of_starts()]
        spans.sort(key=lambda span: (span.begin, span.end))
        return Timeline(self._run, tuple(spans), tuple(sorted(self._instants, key=lambda each: each.time)))

    def _of_rows(self) -> Iterator[Span]:
        for row, cells in self._rows.items():
            step = int(row.split(".")[1])
            for column, (stored, author) in cells.items():
                begin = _begin(column, cells)
                if begin is not None and begin <= stored:
                    yield Span(column, begin, stored, author, row, step)

    def _of_steps(self) -> Iterator[Span]:
        for (kind, number), (stored, author) in self._numbered.items():
            if kind == "batch":
                yield from self._of_step(number, stored, author)
            elif kind in ("checkpoint", "critic_checkpoint", "evaluation"):
                weights = self._numbered.get(("weights", number))
                if weights is not None and weights[0] <= stored:
                    yield Span(kind, weights[0], stored, author, step=number)

    def _of_step(self, step: int, stored: float, author: str) -> Iterator[Span]:
        figures = self._steps.get(step, {})
        waited = figures.get("starved_seconds", figures.get("waited_seconds", 0.0))
        if waited > 0:
            yield Span("wait", stored - waited, stored, author, step=step)
        weights = self._numbered.get(("weights", step + 1))
        if weights is not None and weights[0] >= stored:
            shown = ("reward", "tokens", "staleness", "loss")
            known: dict[str, str | float | int] = {name: figures[name] for name in shown if name in figures}
            yield Span("train", stored, weights[0], weights[1], step=step, arguments=known)

    def _of_starts(self) -> Iterator[Span]:
        begun: dict[str, float] = {}
        for stored, kind, actor in sorted(self._starts):
            if kind == "started":
                begun[actor] = stored
            elif actor in begun:
                yield Span("start", begun.pop(actor), stored, actor)


def _detail(body: Mapping[str, object]) -> str:
    """Return the first line of an event's error or reason, or its file names."""
    why = body.get("error") or body.get("reason") or body.get("row")
    files = body.get("files")
    if not why and isinstance(files, list):
        return ", ".join(name for name in map(str, files[:MOST_FILES]) if len(name) <= LONGEST_NAME)
    return str(why or "").partition("\n")[0][:200]


def _begin(column: str, cells: Cells) -> float | None:
    """Return when the last input of a column was stored; None for a column without inputs."""
    if column == "prompt":
        return None
    stored = cells[column][0]
    if column in AFTER or column in SCORES:
        inputs = AFTER.get(column, ("trajectory",))
        known = [cells[name][0] for name in inputs if name in cells]
        return known[0] if known else None
    return max((time for name, (time, _) in cells.items() if name != column and time <= stored), default=None)
