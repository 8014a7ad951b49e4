"""The cells that the built-in roles exchange: one dataclass for each column and each numbered cell.

Arrays are NumPy, so that no role has to import torch to read a row. `n` is the number of samples of a row, `total`
the number of own tokens of all their sequences, laid end to end in order. `trajectory` has a module of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def _check_numbers(values: Array, what: str) -> None:
    """Raise ValueError unless an array has one dimension, is not empty, and is finite in float32."""
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "fiu":
        msg = f"{what} is {values.dtype}{list(values.shape)}, not numbers of one dimension"
        raise ValueError(msg)
    with np.errstate(over="ignore"):
        if not np.isfinite(values.astype(np.float32)).all():
            msg = f"{what} is not finite: {values[:8]}"
            raise ValueError(msg)


class DropReason(StrEnum):
    """Why a row leaves the run without being trained."""

    NO_SIGNAL = "no_signal"
    TOO_OLD = "too_old"
    SURPLUS = "surplus"
    LOST_SEGMENT = "lost_segment"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Column `prompt`: a task admitted to the run.

    `tokens` is `[prompt_len] int32`, what the model reads; `text` the same before tokenization. `answer` and
    `metadata` are for the reward. `seed` is the row's own, from (run seed, step, index). `min_version` is the
    oldest version of the weights that may generate it; `exact_version` asks for just that version.
    `requeue_of` is the quarantined row whose task it has, if it was requeued.
    """

    text: str
    tokens: Array
    answer: str
    metadata: dict[str, Any]
    seed: int
    min_version: int
    exact_version: bool = False
    greedy: bool = False
    requeue_of: str = ""

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
            msg = f"tokens of a prompt are {self.tokens.dtype}{list(self.tokens.shape)}, not [prompt_len] integers"
            raise ValueError(msg)
        if not 0 <= self.seed < 1 << 64 or self.min_version < 0:
            msg = f"seed {self.seed} or min_version {self.min_version} of a prompt is out of range"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Reward:
    """Column `reward`: how good each of the n samples is; iterate over it for the plain floats of `values`.

    Attributes:
        values: `[n] float32`, finite, higher is better.
        components: name -> `[n] float32`, the parts that `values` was made of; the names are those of the run
            (`reward.components`), in every row.
        token_values: `[total] float32`, rewards of single tokens (process rewards), laid out as the trajectory's
            tokens and added to `values`; None where samples are only rewarded as a whole.
        lengths: `[n] int32`, tokens of each sample among `token_values`; given with it.

    Raises:
        ValueError: a number is not finite, or shapes do not fit each other.
    """

    values: Array
    components: dict[str, Array] = field(default_factory=dict)
    token_values: Array | None = None
    lengths: Array | None = None

    def __post_init__(self) -> None:
        _check_numbers(self.values, "a row's reward")
        for name, values in self.components.items():
            _check_numbers(values, f"reward component {name[:80]!r}")
            if len(values) != len(self.values):
                msg = f"reward component {name[:80]!r} has {len(values)} numbers for {len(self.values)} samples"
                raise ValueError(msg)
        if (self.token_values is None) != (self.lengths is None):
            msg = "a reward has token_values and lengths, or neither"
            raise ValueError(msg)
        if self.token_values is not None and self.lengths is not None:
            _check_numbers(self.token_values, "token_values of a reward")
            lengths = self.lengths
            if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 0).any():
                msg = f"lengths of a reward are {lengths.dtype}{list(lengths.shape)}, not [n] integers of at least 0"
                raise ValueError(msg)
            if len(lengths) != len(self.values) or lengths.sum(dtype=np.int64) != len(self.token_values):
                msg = f"token_values [{len(self.token_values)}] do not fit lengths {lengths[:8].tolist()}"
                raise ValueError(msg)

    def __iter__(self) -> Iterator[float]:
        return iter(self.values.tolist())

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class Advantage:
    """Column `advantage`: what the policy loss multiplies a token's log-prob with.

    Attributes:
        values: `[n] float32`, one for all tokens of a sample, or `[total] float32`, one a token, laid out as the
            trajectory's tokens.
        reward: mean reward of the row's samples.
        returns: `[total] float32`, targets of a critic; None where no critic is trained.

    Raises:
        ValueError: a number is not finite, or an array has more than one dimension.
    """

    values: Array
    reward: float
    returns: Array | None = None

    def __post_init__(self) -> None:
        _check_numbers(self.values, "a row's advantage")
        if not np.isfinite(self.reward):
            msg = f"mean reward of a row is {self.reward}"
            raise ValueError(msg)
        if self.returns is not None:
            _check_numbers(self.returns, "returns of a row")


@dataclass(frozen=True, slots=True)
class Dropped:
    """Column `dropped`: why the row left."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Column `quarantined`: the role that could not handle the row, how often it tried, and its last error."""

    role: str
    deliveries: int
    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Requeued:
    """Column `requeued` of a quarantined row: its task is to be admitted again."""

    unix_time: float


@dataclass(frozen=True, slots=True)
class Readmitted:
    """Column `readmitted` of a requeued row: the new row that has its task."""

    row: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Cell `batch.<step>`: the rows that the step consumes, in order, written before it steps.

    `rows` are indices within the step. `seed` is the step's own. `reward` is the mean over all samples, `staleness`
    the trainer's version minus the oldest version that wrote a token of any row.
    """

    rows: list[int]
    seed: int
    incarnation: int
    reward: float
    staleness: int
    tokens: int
    unix_time: float


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a set of weights: `path` relative to the store, its size and checksum."""

    path: str
    nbytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Weights:
    """Cell `weights.<version>`: a set of weights, published once it lies whole in the store."""

    version: int
    fingerprint: str
    shards: list[Shard]
    incarnation: int
    base_version: int | None = None


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Counts of the rows below the floor, by how they ended."""

    admitted: int = 0
    trained: int = 0
    dropped: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Cell `checkpoint.<version>`: a durable checkpoint. Rows of steps below `floor` are gone; `totals` counts them."""

    version: int
    path: str
    fingerprint: str
    floor: int
    totals: RowCounts = field(default_factory=RowCounts)
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Cell `evaluation.<version>`: mean reward of the version's `rows` held-out rows that could be scored."""

    version: int
    reward: float
    rows: int
