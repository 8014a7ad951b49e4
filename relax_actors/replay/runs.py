"""First step, row and cell at which two runs part, by recorded digests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from safetensors import safe_open

from broker.subjects import RowId
from relax_actors.config.masking import masked
from relax_actors.errors import CodecError, StoreError
from relax_actors.messages import Batch, Weights
from relax_actors.replay.difference import changed_cell, first_tensor
from relax_actors.replay.recording import Recording
from relax_actors.supervision.resume import compare
from relax_actors.weights.protocols import PREFIX_BYTES

NAMES = ("run.name", "run.folder")
"""Settings in which two runs differ by nature."""


@dataclass(frozen=True, slots=True)
class Parting:
    """First place at which two runs differ.

    Attributes:
        what: what differs.
        step: step at which it does; -1 for the weights before the first step.
        row: row whose cells differ.
        column: their column.
        field: first field of the cells that differs, if both runs still have them.
        index: place in its array at which it does.
        tensor: first tensor of the weights after the step that differs.
        a: value of the first run.
        b: value of the second run.
    """

    what: str
    step: int
    row: str | None = None
    column: str | None = None
    field: str | None = None
    index: int | None = None
    tensor: str | None = None
    a: Any = None
    b: Any = None

    def json(self) -> dict[str, Any]:
        """Return the attributes that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def compare_runs(a: Recording, b: Recording) -> dict[str, Any]:
    """Compare two runs over the steps that both have trained.

    Returns:
        `settings` that differ, versions of the `code`, numbers of `steps`, and the first `difference` or None.
    """
    changes = [change for change in compare(a.config, b.config) if change.key not in NAMES]
    secret_safe = [
        {
            "key": c.key,
            **{name: masked(value, c.key.rpartition(".")[2]) for name, value in (("a", c.old), ("b", c.new))},
        }
        for c in changes
    ]
    batches = a.all_cells("batch", Batch), b.all_cells("batch", Batch)
    both = sorted(batches[0].keys() & batches[1].keys())
    versions = range(max(both, default=-1) + 2)
    weights = a.weights(versions), b.weights(versions)
    difference = _of_weights(a, -1, weights)
    equal = 0
    for step in both if difference is None else ():
        difference = _of_rows(a, b, step, (batches[0][step], batches[1][step])) or _of_weights(a, step, weights)
        if difference is not None:
            break
        equal += 1
    return {
        "a": a.run,
        "b": b.run,
        "settings": secret_safe,
        "code": {"a": a.code, "b": b.code, "equal": a.code == b.code},
        "steps": {"a": len(batches[0]), "b": len(batches[1]), "equal": equal},
        "equal": difference is None,
        "difference": None if difference is None else difference.json(),
    }


def _of_rows(a: Recording, b: Recording, step: int, batches: tuple[Batch, Batch]) -> Parting | None:
    one, other = batches
    if one.rows != other.rows:
        return Parting("the steps train other rows, or in another order", step, a=one.rows, b=other.rows)
    place = changed_cell(one.digests, other.digests, len(one.rows)) if other.digests else None
    if place is None:
        return None
    position, column = place
    row = RowId(step, one.rows[position])
    if column not in other.digests:
        return Parting(f"only {a.run} reads the column {column}", step, str(row), column)
    field, index, values = _first_field(a, b, row, column)
    what = "the cells differ" if field else "the cells differed when they were trained"
    return Parting(what, step, str(row), column, field, index, None, *values)


def _of_weights(
    a: Recording, step: int, weights: tuple[Mapping[int, Weights], Mapping[int, Weights]]
) -> Parting | None:
    one, other = (cells.get(step + 1) for cells in weights)
    if one is None or other is None or one.fingerprint == other.fingerprint:
        return None
    number = first_tensor(one.tensors, other.tensors)
    tensor = None if number is None else _tensor_name(a, number, len(one.tensors) // PREFIX_BYTES)
    what = "the weights before the first step differ"
    if step >= 0:
        what = "equal rows, trained on equal weights, give other weights: settings, code or libraries differ"
    return Parting(what, step, tensor=tensor, a=one.fingerprint, b=other.fingerprint)


def _tensor_name(run: Recording, number: int, count: int) -> str | None:
    """Return a published tensor's name, from a run with as many tensors."""
    folder = run.at.folder
    for parent in [*sorted(folder.checkpoints.glob("[0-9]*")), folder.model]:
        names: set[str] = set()
        for file in parent.glob("model*.safetensors"):
            with safe_open(file, framework="np") as tensors:
                names |= set(tensors.keys())
        if len(names) == count:
            return sorted(names)[number]
    return f"number {number + 1} of {count} in the order of the names"


def _first_field(a: Recording, b: Recording, row: RowId, column: str) -> tuple[str | None, int | None, tuple[Any, Any]]:
    """Return the first differing field of two cells, with place and values; or None."""
    fields = []
    for run in (a, b):
        cell = run.table.get(run.table.subject(row, column))
        if cell is None:
            return None, None, (None, None)
        try:
            fields.append(run.table.read_envelope(cell.data).fields)
        except (CodecError, StoreError):
            return None, None, (None, None)
    one, other = fields
    for name in sorted({**one, **other}):
        mine, theirs = one.get(name), other.get(name)
        if isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray):
            if mine.shape != theirs.shape:
                return name, None, (f"shape {list(mine.shape)}", f"shape {list(theirs.shape)}")
            unequal = np.flatnonzero(mine.reshape(-1) != theirs.reshape(-1))
            if len(unequal):
                index = int(unequal[0])
                return name, index, (mine.reshape(-1)[index].item(), theirs.reshape(-1)[index].item())
        elif repr(mine) != repr(theirs):
            return name, None, (repr(mine)[:200], repr(theirs)[:200])
    return None, None, (None, None)
