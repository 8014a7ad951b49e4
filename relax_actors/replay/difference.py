"""First difference of a computation from its record: digests, figures, weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from relax_actors.training.metric_of_step import BY_MICRO_BATCH, is_time
from relax_actors.weights.protocols import PREFIX_BYTES

IDENTITY = ("time", "kind", "role", "n", "step", "rows", BY_MICRO_BATCH)
"""Fields of a published metric that are no figures of the computation."""
SAMPLED = "unreplayed_"
"""Begins the names of figures that an engine measures in some steps only, counted from the start of its process."""


@dataclass(frozen=True, slots=True)
class Difference:
    """First place at which a computation differs from its record.

    Attributes:
        what: what differs, and what that means.
        step: step at which it differs.
        model: "policy" or "critic".
        micro_batch: number of the first micro-batch within the step whose input or figures differ.
        rows: rows of the micro-batch whose figures differ.
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
    rows: list[str] | None = None

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

    def json_of_micro_batch(self) -> dict[str, Any]:
        """Return the same; `equal` is None without a recorded number, as runs publish no `gradient`."""
        return self.json() | ({"equal": None} if self.recorded is None else {})


def compare_figures(recorded: Mapping[str, Any], computed: Mapping[str, float]) -> dict[str, Figure]:
    """Compare the figures of a step; times, and what identifies a metric, are left out."""
    skipped = (*IDENTITY, *(name for name in {**computed, **recorded} if name.startswith(SAMPLED)))
    names = [name for name in {**computed, **recorded} if name not in skipped and not is_time(name)]

    def number(values: Mapping[str, Any], name: str) -> float | None:
        value = values.get(name)
        return float(value) if isinstance(value, int | float) else None

    return {name: Figure(number(recorded, name), number(computed, name)) for name in names}


def micro_batches_of(recorded: Mapping[str, Any], computed: Mapping[str, Sequence[float]]) -> list[dict[str, Figure]]:
    """Return the figures of each micro-batch of a step by name.

    Args:
        recorded: lists of figures as the trainer has published them; values of a metric, which may be anything.
        computed: lists of figures, in the same order.
    """
    count = max((len(values) for values in computed.values()), default=0)

    def value(lists: Mapping[str, Any], name: str, at: int) -> float | None:
        values = lists.get(name)
        known = values[at] if isinstance(values, list) and at < len(values) else None
        return float(known) if isinstance(known, int | float) else None

    return [
        {name: Figure(value(recorded, name, at), value(computed, name, at)) for name in computed} for at in range(count)
    ]


def first_micro_batch(parts: Sequence[Mapping[str, Figure]]) -> tuple[int, str] | None:
    """Return number and figure of the first differing micro-batch, or None."""
    for number, part in enumerate(parts):
        for name, figure in part.items():
            if figure.recorded is not None and not figure.equal:
                return number, name
    return None


def changed_cell(
    recorded: Mapping[str, Sequence[int]], computed: Mapping[str, Sequence[int]], rows: int
) -> tuple[int, str] | None:
    """Return position and column of the first cell whose digest differs, or None.

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
    """Return the number of the first differing tensor, by name; None if unknown.

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
