"""Cells that nobody wrote or needs, as a pure function of the table's cells.

Strays are cells that cannot belong to a row: of steps that are not due for long, of rows without a prompt, of
evaluations that the run does not have. A process with the credentials of a role can write them, and would fill the
table. Rows below the floor, and those of evaluations that have a result, are removed by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from broker.errors import SubjectError
from broker.subjects import TURNS, CellId, RowId
from relax_actors.runtime.row import parse_row
from relax_actors.training.ledger import STRAY_REFILLS

KEPT_COLUMNS = ("quarantined", "requeued", "readmitted")
"""Columns that outlive their rows, so that quarantined rows can be inspected."""
_KEPT = (*KEPT_COLUMNS, "prompt")
MAX_KEPT_WITHOUT_PROMPT = 256
"""Quarantined rows below the floor that are kept although they have no prompt; if there are more, none is."""
MAX_KEY_BYTES, MAX_LEASE_BYTES = 1 << 20, 32 << 10
SIZES = {"failure": 64 << 10, "lease": MAX_LEASE_BYTES, "incarnation": 1 << 10}
"""Largest sizes of an actor's keys by kind; the black box that its lease shows has 16 KiB."""
MAX_DIGITS = 7
"""Most digits of the number of an actor, which is a thousand times that of its node and more."""
WILDCARDS = ("*", ">")
FIRST_COLUMNS = frozenset({"prompt", "dropped", "quarantined"})
"""Columns that a row may have without a prompt: a prompt that cannot be made is quarantined."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The rows that a run may have now.

    Attributes:
        steps: steps of the run.
        rows: rows per step.
        lead: steps that rows may be ahead of the weights.
        version: newest published weights; -1 before the first.
        floor: first step whose rows are still needed.
        eval_rows: rows of one evaluation.
        evaluated: whether the run evaluates a version.
        results: versions that have a result.
    """

    steps: int
    rows: int
    lead: int
    version: int
    floor: int
    eval_rows: int
    evaluated: Callable[[int], bool]
    results: frozenset[int]


def allowed_bytes(key: str, roles: Collection[str]) -> int:
    """Return the largest size of a bucket key; 0 if no process of the run has the key."""
    kind, _, rest = key.partition(".")
    role, _, rest = rest.partition(".")
    is_number = rest.isascii() and rest.isdigit() and len(rest) <= MAX_DIGITS
    if kind in ("run", "note"):
        return MAX_KEY_BYTES
    if kind == "lease" and role in ("node", "root"):
        return MAX_KEY_BYTES if is_number else 0
    if kind == "lease" and role == "owner":
        return MAX_LEASE_BYTES if rest in roles else 0
    if kind == "incarnation" and rest in WILDCARDS:
        # A purge would remove the numbers of all actors of the role, which would then be used twice.
        return MAX_KEY_BYTES if role in roles else 0
    is_known = role in roles and (_is_row(rest) if kind == "failure" else is_number)
    return SIZES.get(kind, 0) if is_known else 0


def _is_row(text: str) -> bool:
    try:
        parse_row(text)
    except SubjectError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Removal:
    """Cells to remove.

    Attributes:
        filters: subjects or filters without the run's prefix, such as `group.57.>`.
        bulk: filters that remove most of the rows below the floor in fewer requests, such as `group.*.3.>`. They match
            rows that are still needed, too: purge only cells stored before the first cell of these rows.
        strays: the strays among the cells.
        finished: folders of the store whose rows are all gone, such as `eval.3`.
    """

    filters: tuple[str, ...]
    strays: tuple[CellId, ...]
    finished: tuple[str, ...]
    bulk: tuple[str, ...] = ()


def removal(cells: Collection[CellId], first: Collection[CellId] | None, extent: Extent) -> Removal:
    """Find the cells to remove.

    Args:
        cells: cells of rows.
        first: cells of `FIRST_COLUMNS`, listed after `cells`, so that a row of `cells` without a prompt had none. None
            if there are too many: then only cells of steps and evaluations that are not due are found.
        extent: the rows that the run may have; read after `cells` were listed.
    """
    rows = None if first is None else _Begun({c.row for c in first if c.field == "prompt"}, {c.row for c in first})
    filters: dict[str, None] = {}
    strays = []
    for cell in sorted(cells, key=lambda cell: cell.index):
        if cell.kind == "group" and cell.step < extent.floor:
            continue
        if (subject := _stray_filter(cell, extent, rows)) is not None:
            filters[subject] = None
            strays.append(cell)
    finished = _finished_evaluations(cells, extent)
    below = [cell for cell in cells if cell.kind == "group" and cell.step < extent.floor]
    over: list[str] = []
    bulk: list[str] = []
    if rows is not None:
        ends = [cell for cell in first or () if cell.kind == "group" and cell.step < extent.floor]
        quarantined = _quarantined([*below, *ends], rows.prompts, extent.rows * STRAY_REFILLS)
        over, bulk = _below_floor(below, quarantined), _in_bulk(below, quarantined)
    wanted = dict.fromkeys([*(f"{name}.>" for name in finished), *over, *filters])
    return Removal(tuple(wanted), tuple(strays), tuple(finished), tuple(bulk))


@dataclass(frozen=True, slots=True)
class _Begun:
    prompts: set[RowId]
    """Rows with a prompt."""
    rows: set[RowId]
    """Rows with a prompt or an end."""


def _stray_filter(cell: CellId, extent: Extent, begun: _Begun | None) -> str | None:
    """Return a filter that removes a stray and its like; None for a cell that is no stray."""
    row = cell.row
    if not is_possible(row, extent):
        whole = cell.kind == "group" or cell.index < extent.eval_rows
        return f"{cell.kind}.{cell.step}.>" if whole else f"{row}.>"
    if begun is None or row in begun.prompts:
        return None
    if cell.kind == "group" and cell.index >= extent.rows * STRAY_REFILLS:
        if RowId(cell.step, cell.index - extent.rows) in begun.rows:
            return None
        begun.rows.discard(row)  # so that its successors are strays, too
        return f"{row}.>"
    is_kept = cell.field in FIRST_COLUMNS or (cell.field in KEPT_COLUMNS and row in begun.rows)
    return None if is_kept else f"{row}.{cell.field}"


def is_possible(row: RowId, extent: Extent) -> bool:
    """Whether a row may have valid cells now or after the next publication."""
    if row.kind == "eval":
        due = row.step <= min(extent.version, extent.steps) and extent.evaluated(row.step)
        return due and row.index < extent.eval_rows
    return row.step <= min(extent.steps - 1, extent.version + extent.lead + 1)


def is_late_end(cell: CellId, extent: Extent) -> bool:
    """Whether a cell ends a row of a needed step, too many refills ahead to be valid."""
    if cell.kind != "group" or cell.step < extent.floor or not is_possible(cell.row, extent):
        return False
    return cell.index >= extent.rows * STRAY_REFILLS and cell.field in FIRST_COLUMNS and cell.field != "prompt"


def _finished_evaluations(cells: Iterable[CellId], extent: Extent) -> list[str]:
    """Name the evaluations whose rows are not needed: all finished ones but the last."""
    present = {cell.step for cell in cells if cell.kind == "eval"}
    return [f"eval.{v}" for v in sorted(present & extent.results - {max(extent.results, default=-1)})]


def _quarantined(below: list[CellId], prompts: set[RowId], last_index: int) -> set[RowId]:
    """Return the quarantined rows below the floor, which are kept.

    Args:
        below: the cells below the floor.
        prompts: rows with a prompt.
        last_index: rows of this index and later ones are not kept without a prompt.
    """
    quarantined = {cell.row for cell in below if cell.field == "quarantined"}
    quarantined = {row for row in quarantined if row in prompts or row.index < last_index}
    unprompted = quarantined - prompts
    return quarantined - unprompted if len(unprompted) > MAX_KEPT_WITHOUT_PROMPT else quarantined


def _below_floor(below: list[CellId], quarantined: set[RowId]) -> list[str]:
    """Return filters for the cells below the floor, except those of quarantined rows."""
    kept = {row.step for row in quarantined}
    gone = [c for c in below if c.step in kept and not (c.row in quarantined and c.field in _KEPT)]
    steps = sorted({cell.step for cell in below} - kept)
    return [*(f"group.{step}.>" for step in steps), *(f"{cell.row}.{cell.field}" for cell in gone)]


def _column(cell: CellId) -> str:
    """Return the end of a filter for a column of rows; all turn cells of a row are one column."""
    return f"{TURNS}.>" if cell.field.startswith(f"{TURNS}.") else cell.field


def _in_bulk(below: list[CellId], quarantined: set[RowId]) -> list[str]:
    """Return a filter for each index of rows below the floor; none if there are few steps.

    After a purge that removes anything the server counts the messages that each consumer has left, which takes
    milliseconds in a large table. Each filter names an index, so that no consumer's filter lies within it: the server
    moves such a consumer to the first message left, and releases differ in what it does with its other filters.
    """
    kept = {row.index for row in quarantined}
    indices = sorted({cell.index for cell in below})
    columns = sorted({_column(cell) for cell in below}.difference(_KEPT)) if kept else []
    subjects = [f"group.*.{i}.{column}" for i in indices for column in (columns if i in kept else [">"])]
    return subjects if 2 * len(subjects) < len({cell.step for cell in below}) else []
