"""Where a computation parts from its record: pure comparisons of digests, figures and weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from relax_actors.training.metric_of_step import is_time
from relax_actors.weights.protocols import PREFIX_BYTES

IDENTITY = ("time", "kind", "role", "n", "step", "rows")
"""Fields of a published metric that are no figures of the computation."""


@dataclass(frozen=True, slots=True)
class Difference:
    """First place at which a computation differs from its record.

    Attributes:
        what: what differs, and what that means.
        step: step at which it differs.
        model: "policy" or "critic".
        micro_batch: number of the micro-batch within the step whose input differs.
        row: row whose cell differs, such as `group.4.2`.
        column: its column.
        figure: name of the figure.
        tensor: name of the first tensor.
        recorded: recorded value of the figure.
        computed: computed value of the figure.
    """

    what: str
    step: int
    model: str = "policy"
    micro_batch: int | None = None
    row: str | None = None
    column: str | None = None
    figure: str | None = None
    tensor: str | None = None
    recorded: float | None = None
    computed: float | None = None

    def json(self) -> dict[str, Any]:
        """Return the attributes that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a step, recorded and computed; None where it does not exist."""

    recorded: float | None
    computed: float | None

    @property
    def equal(self) -> bool:
        """Whether both are the same number."""
        one, other = self.recorded, self.computed
        return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))

    def json(self) -> dict[str, Any]:
        """Return both numbers and whether they are equal."""
        return {"recorded": self.recorded, "computed": self.computed, "equal": self.equal}


def compare_figures(recorded: Mapping[str, Any], computed: Mapping[str, float]) -> dict[str, Figure]:
    """Compare the figures of a step; times, and what identifies a metric, are left out."""
    names = [name for name in {**computed, **recorded} if name not in IDENTITY and not is_time(name)]

    def number(values: Mapping[str, Any], name: str) -> float | None:
        value = values.get(name)
        return float(value) if isinstance(value, int | float) else None

    return {name: Figure(number(recorded, name), number(computed, name)) for name in names}


def changed_cell(
    recorded: Mapping[str, Sequence[int]], computed: Mapping[str, Sequence[int]], rows: int
) -> tuple[int, str] | None:
    """Return position and column of the first cell, in the order of the rows, whose digest differs; None if none does.

    Args:
        recorded: digests of a batch by column; empty if it has none.
        computed: digests of the cells as they are now.
        rows: rows of the batch.
    """
    for position in range(rows):
        for column, digests in recorded.items():
            now = computed.get(column, ())
            if position < len(digests) and (position >= len(now) or digests[position] != now[position]):
                return position, column
    return None


def first_tensor(recorded: bytes, computed: bytes) -> int | None:
    """Return the number of the first tensor that differs, in the order of the names; None if it cannot be told.

    Args:
        recorded: digests of the first tensors of published weights, see `Weights.tensors`.
        computed: those of other weights.
    """
    if not recorded or len(recorded) != len(computed):
        return None
    pairs = range(0, len(recorded), PREFIX_BYTES)
    return next(
        (at // PREFIX_BYTES for at in pairs if recorded[at : at + PREFIX_BYTES] != computed[at : at + PREFIX_BYTES]),
        None,
    )
