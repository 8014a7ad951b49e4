"""Prompts, completions and rewards of a run's rows, read from its table as an observer.

Cells come from other processes: a field of another type is left out, and a text is printed by `relax_actors.printable`
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from broker.codec import open_envelope
from broker.fields import TensorRef
from broker.history import History
from broker.store import Store
from broker.subjects import RowId, Subjects
from broker.table import Cell
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import CodecError, ConfigError, StoreError, SubjectError
from relax_actors.messages.said import said
from relax_actors.messages.samples import unpack_conversations
from relax_actors.monitoring.connection import Observed, find
from relax_actors.monitoring.render import source_line
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
    """Reads the rows that a table still has.

    Args:
        at: connection to the run's broker.
        run: name or folder of the run; its store and tokenizer are used if this machine has them.
    """

    def __init__(self, at: Observed, run: str) -> None:
        self._connection, self._subjects = at.connection, Subjects(at.run)
        self._store: Store | None = None
        self._model: Path | None = None
        with suppress(ConfigError):
            folder = find(run)
            config = folder.load_config()
            path = config.store_path if config.store_path.exists() else folder.root / "store"
            self._store = Store(path) if path.exists() else None
            self._model = config.model_path if config.model_path.exists() else folder.model

    def rows(self, step: int | None, last: int) -> list[ShownRow]:
        """Return the last rows with samples, in the order in which they were scored.

        Args:
            step: only rows of this step, and held-out rows of this version; None for all.
            last: at most so many; 0 for all of the step.
        """
        names = self._connection.call(self._list(step), 600)
        return [found for row in names[-last if last else 0 :] if (found := self._row(row)) is not None]

    def floor(self) -> int:
        """Return the first step whose rows are not collected yet."""
        cells = self._connection.call(self._read(self._subjects.numbered("checkpoint", "*")), 600)
        floors = [_fields(cell.data).get("floor") for cell in cells]
        return max((floor for floor in floors if isinstance(floor, int)), default=0)

    def newest(self) -> int | None:
        """Return the newest step that has a sample; None if no row has one."""
        steps = [row.step for row in self._connection.call(self._list(None), 600) if row.kind == "group"]
        return max(steps, default=None)

    async def _list(self, step: int | None) -> list[RowId]:
        """List rows in the order of their samples' rewards; in that of the samples themselves if none is scored."""
        # Rewards are small; a step has few rows, so that those without a reward can be listed, too.
        for column in ("reward", "trajectory") if step is None else ("trajectory",):
            filters = [self._subjects.column(column, kind, "*" if step is None else step) for kind in ROW_KINDS]
            cells = [cell for subject in filters for cell in await self._read(subject)]
            if cells:
                return [self._subjects.parse(cell.subject).row for cell in sorted(cells, key=lambda c: c.sequence)]
        return []

    async def _read(self, subject: str) -> list[Cell]:
        """Read all stored cells that a filter matches; a subject that names no cell is left out."""
        history = History(self._connection, self._subjects.table_stream, subject)
        found: list[Cell] = []
        while page := await history.page():
            for cell in page:
                with suppress(SubjectError):
                    self._subjects.parse(cell.subject)
                    found.append(cell)
        return found

    def _row(self, row: RowId) -> ShownRow | None:
        """Read one row; None if it was collected meanwhile, or its samples are malformed."""
        columns = ("prompt", "trajectory", "reward")
        found = [self._connection.call(self._read(self._subjects.cell(row, name)), 60) for name in columns]
        prompt, trajectory, reward = (_fields(cells[-1].data) if cells else {} for cells in found)
        texts = trajectory.get("texts")
        if not isinstance(texts, list):
            return None
        versions = self._array(trajectory, "versions")
        sampled = None if versions is None else versions[versions >= 0]
        media = prompt.get("media")
        messages = said(prompt.get("messages"))
        return ShownRow(
            row,
            "" if messages else self._text(prompt),
            messages,
            [source_line(medium) for medium in media if isinstance(medium, dict)] if isinstance(media, list) else [],
            str(prompt.get("answer", "")),
            (int(sampled.min()), int(sampled.max())) if sampled is not None and len(sampled) else None,
            self._samples(trajectory, [str(text) for text in texts], self._array(reward, "values", "fiu")),
        )

    def _samples(
        self, trajectory: dict[str, Any], texts: Sequence[str], values: np.ndarray[Any, Any] | None
    ) -> list[ShownSample]:
        reasons = trajectory.get("finish_reasons")
        lengths, packed = self._lengths(trajectory, len(texts)), self._array(trajectory, "conversations")
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

    def _lengths(self, trajectory: dict[str, Any], samples: int) -> list[int]:
        """Return the tokens of each sample; empty if they are unknown."""
        lengths, counts = self._array(trajectory, "lengths"), self._array(trajectory, "sequence_counts")
        counts = np.ones(samples, np.int64) if counts is None else counts
        if lengths is None or len(counts) != samples:
            return []
        parts = np.split(lengths, np.cumsum(counts, dtype=np.int64)[:-1])
        return [int(part.sum()) for part in parts]

    def _text(self, prompt: dict[str, Any]) -> str:
        """Return the text of a prompt; of one that has tokens only, their text."""
        text, tokens = str(prompt.get("text", "")), self._array(prompt, "tokens")
        if not text and tokens is not None and self._model is not None:
            with suppress(ConfigError, OverflowError):  # the model is elsewhere, or a token is no number of one
                return Tokenizer(self._model).spell(tokens)
        return text

    def _array(self, fields: dict[str, Any], name: str, kinds: str = "iu") -> np.ndarray[Any, Any] | None:
        """Return a one-dimensional array of numbers; None without one, or if it is in a store of another machine."""
        value = fields.get(name)
        if isinstance(value, TensorRef):
            if self._store is None:
                return None
            try:
                value = self._store.reader()(value)
            except StoreError:  # collected meanwhile
                return None
        is_array = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in kinds
        return value if is_array else None


def _fields(data: bytes) -> dict[str, Any]:
    """Return the fields of a cell; none of a malformed one."""
    with suppress(CodecError):
        return open_envelope(data).fields
    return {}
