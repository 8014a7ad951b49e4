"""Numbers of whole samples and of the step, which a loss needs before its micro-batches.

A forward pass over the sequences of a step, without gradient, yields one `SequenceRecord` for each sequence. From the
records of all sequences, in the order of the step, follow the sums over samples and over the step and the choice of
tokens. They depend neither on the cut into micro-batches nor on the ranks that computed the records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """What the forward pass found for the trained tokens of a sequence.

    Attributes:
        logprobs: `[tokens] float32`, of the policy before the step.
        ratio: `[tokens] float32`, importance ratio.
        advantages: `[tokens] float32`.
        entropies: `[tokens] float32`; empty if the algorithm reads none.
        sums: sums over the tokens by name, as in `policy.Totals.recorded`.
        terms: `[tokens] float32`, terms of sums by name; empty unless the sums are of chosen tokens only.
    """

    logprobs: Array
    ratio: Array
    advantages: Array
    entropies: Array
    sums: Mapping[str, float]
    terms: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Constants of a step's backward pass.

    Attributes:
        sums: sums over the step by name.
        sample_sums: for each sequence, the sums over its sample by name.
        row_sums: for each sequence, the sums over its row by name.
        by_row: sums over each row of the step by name, in the order of the rows' first sequences.
        row_numbers: for each sequence, the place of its row in `by_row`.
        selected: for each sequence, `[tokens] bool`, tokens of the covariance choice; None without one.
        uncertain: for each sequence, `[tokens] bool`, tokens in the top share of entropy; None without one.
    """

    sums: Mapping[str, float] = field(default_factory=dict)
    sample_sums: Sequence[Mapping[str, float]] = ()
    row_sums: Sequence[Mapping[str, float]] = ()
    by_row: Mapping[str, Sequence[float]] = field(default_factory=dict)
    row_numbers: Sequence[int] = ()
    selected: Sequence[Array] | None = None
    uncertain: Sequence[Array] | None = None


def sum_records(
    records: Sequence[SequenceRecord], samples: Sequence[Hashable], rows: Sequence[Hashable] = ()
) -> StepFacts:
    """Sum records of sequences over samples, rows and all, in the order given.

    `samples` and `rows` are the keys of each sequence's; without rows, no sums over them.
    """
    of_rows = _sums_by(records, rows) if rows else []
    firsts = dict(reversed(list(zip(rows, of_rows, strict=True))))
    order = {row: number for number, row in enumerate(dict.fromkeys(rows))}
    by_row = {name: [firsts[row][name] for row in order] for name in (of_rows[0] if of_rows else ())}
    return StepFacts(
        _added([record.sums for record in records]),
        _sums_by(records, samples),
        of_rows,
        by_row,
        [order[row] for row in rows],
    )


def _sums_by(records: Sequence[SequenceRecord], keys: Sequence[Hashable]) -> list[Mapping[str, float]]:
    """Return for each record the sums over all records of the same key."""
    members: dict[Hashable, list[Mapping[str, float]]] = {}
    for key, record in zip(keys, records, strict=True):
        members.setdefault(key, []).append(record.sums)
    totals = {key: _added(sums) for key, sums in members.items()}
    return [totals[key] for key in keys]


def choose_tokens(records: Sequence[SequenceRecord], choose: Callable[[Array, Array, Array], Array]) -> list[Array]:
    """Choose tokens among those of all sequences.

    Args:
        records: one for each sequence.
        choose: function of the advantages, log-probs and ratios of all tokens to a mask, all `[tokens]`.

    Returns:
        The mask of each sequence, `[tokens] bool`.
    """
    flat = [np.concatenate([getattr(r, name) for r in records]) for name in ("advantages", "logprobs", "ratio")]
    return _split(choose(flat[0], flat[1], flat[2]), records)


def most_uncertain(records: Sequence[SequenceRecord], share: float) -> list[Array]:
    """Select the share of the step's tokens with the highest entropies (arXiv 2506.01939).

    A token is selected if its entropy is at least the quantile `1 - share` of the entropies of all trained tokens.

    Returns:
        The mask of each sequence, `[tokens] bool`.
    """
    entropies = np.concatenate([record.entropies for record in records]).astype(np.float64)
    threshold = np.quantile(entropies, 1 - share) if len(entropies) else 0.0
    return _split(entropies >= threshold, records)


def of_selected(records: Sequence[SequenceRecord], masks: Sequence[Array]) -> list[SequenceRecord]:
    """Return records of chosen tokens, `[tokens] bool`, counted as "selected"."""
    chosen = []
    for record, mask in zip(records, masks, strict=True):
        sums = {name: math.fsum(values[mask].tolist()) for name, values in record.terms.items()}
        chosen.append(replace(record, sums={**record.sums, **sums, "selected": float(mask.sum())}))
    return chosen


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up by name, rounded once, so that the result does not depend on the order."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: math.fsum(part.get(name, 0.0) for part in parts) for name in names}


def _split(mask: Array, records: Sequence[SequenceRecord]) -> list[Array]:
    return np.split(mask, np.cumsum([len(record.logprobs) for record in records])[:-1])
