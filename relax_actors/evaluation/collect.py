"""Read the held-out rows of a version from the table, as the records of its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from broker.subjects import RowId
from relax_actors.config import Config
from relax_actors.config.evaluation import EvalSet
from relax_actors.errors import CodecError, StoreError
from relax_actors.evaluation.records import Answer, Record, SetFacts
from relax_actors.messages import Dropped, Prompt, Quarantined, Reward, Trajectory
from relax_actors.messages.said import said
from relax_actors.messages.samples import unpack_conversations
from relax_actors.rewards._choice import chosen
from relax_actors.rewards._numeric import last_number
from relax_actors.rewards._text import final_part

if TYPE_CHECKING:
    from broker.table import Cell
    from broker.table_reader import TableReader

T = TypeVar("T")
PAGE = 128
"""Rows that are read together."""
COLUMNS = {"prompt": Prompt, "trajectory": Trajectory, "reward": Reward, "quarantined": Quarantined, "dropped": Dropped}
"""Columns of a held-out row that its record shows."""
CHANGED = "left out: [eval] was changed while the version was evaluated; the row is of another set or other settings"
NO_CATEGORY = "(none)"
"""Category of a row without the set's category field."""
MAX_VOTE = 2000
"""Characters of an answer that are compared."""


def facts_of(config: Config) -> dict[str, SetFacts]:
    """Return what figures of a run's sets depend on; examples have no passes."""
    sets = {} if config.eval is None else config.eval.named
    pairs = config.algorithm.rows == "pairs"
    passes = not config.from_data or pairs
    scored = ("preference of a pair" if pairs else "log-prob") if config.from_data else None
    return {
        name: SetFacts(each.samples, each.ks, each.passes if passes else None, each.category, scored or each.reward)
        for name, each in sets.items()
    }


def records_of(
    table: TableReader, config: Config, rows: Sequence[RowId], progress: Callable[[], None]
) -> Iterator[Record]:
    """Yield each row's record in order; `progress` is called between pages."""
    assert config.eval is not None  # noqa: S101 without it there are no held-out rows
    marks = config.eval.marks()
    for begin in range(0, len(rows), PAGE):
        page = rows[begin : begin + PAGE]
        cells = iter(table.get_all([table.subject(row, name) for row in page for name in COLUMNS]))
        for row in page:
            name, held_out, _ = config.eval.place(row.index)
            columns = {column: _read(table, next(cells), kind) for column, kind in COLUMNS.items()}
            yield _record(row, name, held_out, columns, marks[row.index])
        progress()


def _read(table: TableReader, cell: Cell | None, expected: type[T]) -> T | None:
    """Decode a cell; None if there is none, it is malformed, or its arrays are lost."""
    with suppress(CodecError, StoreError):
        return None if cell is None else table.read(cell.data, expected)
    return None


def _record(row: RowId, name: str, held_out: EvalSet, columns: dict[str, Any], mark: str) -> Record:
    """Return a row's record, without answers that began with other settings."""
    prompt: Prompt | None = columns["prompt"]
    if prompt is not None and prompt.mark != mark:
        return Record(str(row), name, "", prompt.text, prompt.answer, [], problem=CHANGED)
    fields = {} if prompt is None else prompt.metadata
    category = "" if held_out.category is None else str(fields.get(held_out.category, NO_CATEGORY))
    answers = _answers(columns["trajectory"], columns["reward"], held_out.vote)
    return Record(
        row=str(row),
        set=name,
        category=category,
        prompt="" if prompt is None else prompt.text,
        answer="" if prompt is None else prompt.answer,
        answers=answers,
        messages=[] if prompt is None or prompt.text else said(prompt.messages),
        problem="" if answers else _problem(columns["quarantined"], columns["dropped"]),
    )


def _answers(trajectory: Trajectory | None, reward: Reward | None, vote: str) -> list[Answer]:
    """Return the scored answers of a row; without texts if its trajectory is lost."""
    if reward is None:
        return []
    values = reward.values.astype(float).tolist()
    if trajectory is None or len(trajectory.texts) != len(values):
        return [Answer("", value) for value in values]
    lengths = trajectory.sample_lengths.tolist()
    talks: list[list[tuple[str, str]]] = [[] for _ in values]
    if trajectory.conversations is not None:
        with suppress(ValueError):
            talks = [said(one) for one in unpack_conversations(trajectory.conversations, len(values))]
    texts, reasons = trajectory.texts, trajectory.finish_reasons
    return [
        Answer(text, value, length, reason, vote_of(text, vote), talk)
        for text, value, length, reason, talk in zip(texts, values, lengths, reasons, talks, strict=True)
    ]


def _problem(quarantined: Quarantined | None, dropped: Dropped | None) -> str:
    if quarantined is not None:
        return f"quarantined by {quarantined.role}: {quarantined.error}"
    return "its reward is malformed" if dropped is None else f"dropped, {dropped.reason}: {dropped.detail}"


def vote_of(text: str, form: str) -> str:
    """Return what a text answers in the form `eval.vote`: "final", "number" or "letter".

    Equal answers give equal strings, and a text without an answer an empty one.
    """
    if form == "number":
        number = last_number(text)
        return "" if number is None else str(number)
    if form == "letter":
        return chosen(final_part(text), []) or ""
    return " ".join(final_part(text).split())[:MAX_VOTE]
