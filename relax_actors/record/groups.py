"""Groups of a step: ends, rewards, versions and tokens of its rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from broker.codec import Resolver
from broker.subjects import RowId
from relax_actors.record.row_cells import RowCell, RowCells
from relax_actors.record.rules import End, Group


def groups_of(
    step: int, cells: Mapping[int, Mapping[str, RowCell]], trained: Collection[int] | None, resolve: Resolver | None
) -> tuple[Group, ...]:
    """Return the rows of a step, by index, from its cells: index -> column -> cell.

    `trained` are the indices of its batch, if it has one; `resolve` reads arrays in the store, if this machine has it.
    """
    rest = End.IN_FLIGHT if trained is None else End.SURPLUS
    indices = sorted({*cells, *(trained or ())})
    rows = (RowCells(RowId(step, index), cells.get(index, {}).values(), resolve) for index in indices)
    return tuple(_group(row, End.TRAINED if row.row.index in (trained or ()) else rest) for row in rows)


def _group(row: RowCells, end: End) -> Group:
    reason = ""
    if "quarantined" in row.cells:
        end, reason = End.QUARANTINED, str(row.fields("quarantined").get("role", ""))
    elif "dropped" in row.cells:
        end, reason = End.DROPPED, str(row.fields("dropped").get("reason", ""))
    versions, rewards = row.array("trajectory", "versions"), row.array("reward", "values", "fiu")
    sampled = () if versions is None else versions[versions >= 0]
    scored = rewards is not None and bool(np.isfinite(rewards).all())
    return Group(
        row.row.index,
        end,
        reason,
        tuple(rewards.astype(float).tolist()) if rewards is not None and scored else (),
        int(np.min(sampled)) if len(sampled) else None,
        None if versions is None else len(versions),
    )
