"""Prompts, completions and rewards of rows, read from table and record.

Cells come from other processes: a field of another type is left out, and a text is printed by `relax_actors.printable`
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from broker.codec import open_envelope
from broker.subjects import RowId, Subjects
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import CodecError, ConfigError, RecordError
from relax_actors.messages.said import said
from relax_actors.messages.samples import unpack_conversations
from relax_actors.monitoring.connection import Observed
from relax_actors.monitoring.render import source_line
from relax_actors.monitoring.row_reader import RowReader
from relax_actors.record.row_cells import RowCells
from relax_actors.record.row_detail import RowDetail, detail_of
from relax_actors.runtime.row import ROW_KINDS


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One sample: what the model wrote, and what it was worth.

    Attributes:
        text: text that the model wrote.
        reward: its reward; None if it is not scored yet.
        finish_reason: why it ended; empty if unknown.
        tokens: number of its tokens; None if the arrays of the row are not on this machine.
        messages: the whole conversation of an episode, as (role, text); empty for a completion.
    """

    text: str
    reward: float | None
    finish_reason: str = ""
    tokens: int | None = None
    messages: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ShownRow:
    """One row: a prompt with its samples.

    Attributes:
        row: id of the row; the step of a held-out row is the version that answered.
        prompt: text of the prompt.
        messages: the prompt as chat messages, as (role, text); empty for a text.
        media: kind, size and place of each medium of the prompt.
        answer: expected answer.
        versions: oldest and newest version of the weights that sampled it; None if unknown.
        samples: its samples.
        problem: why it has none and will get none; empty if it has, or may get them.
    """

    row: RowId
    prompt: str
    messages: list[tuple[str, str]]
    media: list[str]
    answer: str
    versions: tuple[int, int] | None
    samples: list[ShownSample]
    problem: str = ""


class SampleReader:
    """Reads rows that the table still has, and those that the record keeps.

    Args:
        at: connection to the run's broker.
        run: name or folder of the run; its store, record and tokenizer are used if this machine has them.

    Attributes:
        problems: what is wrong with parts of the record that `rows` left out.
    """

    def __init__(self, at: Observed, run: str) -> None:
        self._connection, self._subjects = at.connection, Subjects(at.run)
        self.reader = RowReader(at.run, run)
        self.problems: list[str] = []

    def rows(self, step: int | None, last: int) -> list[ShownRow]:
        """Return the last rows with samples, in the order in which they were scored or kept.

        With `step`, only rows of this step, and held-out rows of this version. At most `last` of them; 0 for all of the
        step.
        """
        names = self._connection.call(self._list(step), 600)
        record = self.reader.record
        if record is not None and (step is not None or len(names) < last):
            known = set(names)
            names = [row for row in record.rows(step=step) if row not in known] + names
            self.problems += map(str, record.damages())
        return [shown for row in names[-last if last else 0 :] if (shown := self._row(row)) is not None]

    def detail(self, row: RowId) -> RowDetail | None:
        """Return everything about a row, or None; raises RecordError."""
        cells = self._connection.call(self.reader.row(self._connection, row), 60)
        return None if cells is None else detail_of(cells, self.reader.spell)

    def floor(self) -> int:
        """Return the first step whose rows are not collected yet."""
        cells = self._connection.call(
            self.reader.read(self._connection, self._subjects.numbered("checkpoint", "*")), 600
        )
        floors = [_fields(cell.data).get("floor") for cell in cells]
        return max((floor for floor in floors if isinstance(floor, int)), default=0)

    def newest(self) -> int | None:
        """Return the newest step that has a sample in the table; None if no row has one."""
        steps = [row.step for row in self._connection.call(self._list(None), 600) if row.kind == "group"]
        return max(steps, default=None)

    async def _list(self, step: int | None) -> list[RowId]:
        """List rows in the order of their rewards, else of their samples."""
        # Rewards are small; a step has few rows, so that those without a reward can be listed, too.
        for column in ("reward", "trajectory") if step is None else ("trajectory",):
            filters = [self._subjects.column(column, kind, "*" if step is None else step) for kind in ROW_KINDS]
            cells = [cell for subject in filters for cell in await self.reader.read(self._connection, subject)]
            if cells:
                return [self._subjects.parse(cell.subject).row for cell in sorted(cells, key=lambda c: c.sequence)]
        return []

    def _row(self, row: RowId) -> ShownRow | None:
        """Read one row; None if it was collected meanwhile, or its samples are malformed."""
        try:
            cells = self._connection.call(self.reader.row(self._connection, row), 60)
        except RecordError as error:
            self.problems.append(str(error))
            return None
        if cells is None:
            return None
        prompt, trajectory = cells.fields("prompt"), cells.fields("trajectory")
        texts = trajectory.get("texts")
        if not isinstance(texts, list):
            return None
        versions = cells.array("trajectory", "versions")
        sampled = None if versions is None else versions[versions >= 0]
        media = prompt.get("media")
        messages = said(prompt.get("messages"))
        return ShownRow(
            row,
            "" if messages else self._text(cells),
            messages,
            [source_line(medium) for medium in media if isinstance(medium, dict)] if isinstance(media, list) else [],
            str(prompt.get("answer", "")),
            (int(sampled.min()), int(sampled.max())) if sampled is not None and len(sampled) else None,
            _samples(cells, trajectory.get("finish_reasons"), [str(text) for text in texts]),
        )

    def _text(self, cells: RowCells) -> str:
        """Return the text of a prompt; of one that has tokens only, their text."""
        text, tokens = str(cells.fields("prompt").get("text", "")), cells.array("prompt", "tokens")
        if not text and tokens is not None and self.reader.model is not None:
            with suppress(ConfigError, OverflowError):  # the model is elsewhere, or a token is no number of one
                return Tokenizer(self.reader.model).spell(tokens)
        return text


def _samples(cells: RowCells, reasons: Any, texts: Sequence[str]) -> list[ShownSample]:
    lengths, packed = _lengths(cells, len(texts)), cells.array("trajectory", "conversations")
    values = cells.array("reward", "values", "fiu")
    talks: list[list[dict[str, Any]]] = []
    if packed is not None:
        with suppress(ValueError):
            talks = unpack_conversations(packed, len(texts))
    return [
        ShownSample(
            text,
            float(values[i]) if values is not None and i < len(values) and np.isfinite(values[i]) else None,
            str(reasons[i]) if isinstance(reasons, list) and i < len(reasons) else "",
            lengths[i] if i < len(lengths) else None,
            said(talks[i]) if talks else [],
        )
        for i, text in enumerate(texts)
    ]


def _lengths(cells: RowCells, samples: int) -> list[int]:
    """Return the tokens of each sample; empty if they are unknown."""
    lengths, counts = cells.array("trajectory", "lengths"), cells.array("trajectory", "sequence_counts")
    counts = np.ones(samples, np.int64) if counts is None else counts
    if lengths is None or len(counts) != samples:
        return []
    parts = np.split(lengths, np.cumsum(counts, dtype=np.int64)[:-1])
    return [int(part.sum()) for part in parts]


def _fields(data: bytes) -> dict[str, Any]:
    """Return the fields of a cell; none of a malformed one."""
    with suppress(CodecError):
        return open_envelope(data).fields
    return {}
