"""Cells of the built-in roles: a dataclass for each column and numbered cell.

Arrays are NumPy, so a role can read a row without importing torch. In shapes, `n` is the number of samples of a row and
`total` the number of own tokens of all their sequences, concatenated in order. `Trajectory` has a module of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.messages.media import MediaSource

Array = NDArray[Any]


def _check_numbers(values: Array, what: str) -> None:
    """Raise ValueError unless an array is one-dimensional, not empty, and finite in float32."""
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "fiu":
        msg = f"{what} is {values.dtype}{list(values.shape)}, not a one-dimensional array of numbers"
        raise ValueError(msg)
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32, copy=False)
    if not np.isfinite(rounded).all():
        msg = f"{what} is not finite: {values[:8]}"
        raise ValueError(msg)


class DropReason(StrEnum):
    """Why a row leaves the run untrained."""

    NO_SIGNAL = "no_signal"
    TOO_OLD = "too_old"
    SURPLUS = "surplus"
    LOST_SEGMENT = "lost_segment"
    TRUNCATED = "truncated"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Column `prompt`: a task admitted to the run.

    Attributes:
        text: prompt before tokenization.
        tokens: `[prompt_len] int32`, prompt as the model reads it.
        answer: expected answer, for the reward.
        metadata: further data of the task, for the reward.
        seed: seed of the row, derived from (run seed, step, index).
        min_version: oldest weight version that may generate the row.
        exact_version: whether `min_version` is the only version that may generate it.
        greedy: whether to choose the most likely tokens.
        requeue_of: quarantined row with the same task, if the row was requeued; else empty.
        media: images, videos and sounds of the prompt in the order of their placeholders in `tokens`, one token each.
        messages: the prompt as chat messages, with those of [data]; empty for a text without chat template.
        mark: of a held-out row, its set, number and settings, see `EvalSection.marks`; empty for training rows.

    Raises:
        ValueError: the tokens are no one-dimensional integers, or a number is out of range.
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
    media: list[MediaSource] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    mark: str = ""

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
            msg = f"tokens of a prompt are {self.tokens.dtype}{list(self.tokens.shape)}, not [prompt_len] integers"
            raise ValueError(msg)
        if not 0 <= self.seed < 1 << 64 or self.min_version < 0:
            msg = f"seed {self.seed} or min_version {self.min_version} of a prompt is out of range"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Reward:
    """Column `reward`: rewards of the n samples; iterating yields `values` as floats.

    Attributes:
        values: `[n] float32`, finite, higher is better.
        components: name -> `[n] float32`, parts of `values`; the same names in every row (`reward.components`).
        token_values: `[total] float32`, rewards of single tokens (process rewards), in the layout of the trajectory's
            tokens, added to `values`; None if only whole samples are rewarded.
        lengths: `[n] int32`, number of `token_values` of each sample; None exactly if `token_values` is.

    Raises:
        ValueError: a number is not finite, or shapes do not match.
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
            msg = "a reward has token_values without lengths, or lengths without token_values; set both or neither"
            raise ValueError(msg)
        if self.token_values is not None and self.lengths is not None:
            _check_numbers(self.token_values, "token_values of a reward")
            lengths = self.lengths
            if lengths.ndim != 1 or lengths.dtype != np.int32 or (lengths < 0).any():
                msg = f"lengths of a reward are {lengths.dtype}{list(lengths.shape)}, not [n] int32 of at least 0"
                raise ValueError(msg)
            if len(lengths) != len(self.values) or lengths.sum(dtype=np.int64) != len(self.token_values):
                msg = f"token_values [{len(self.token_values)}] do not match lengths {lengths[:8].tolist()}"
                raise ValueError(msg)

    def __iter__(self) -> Iterator[float]:
        return iter(self.values.tolist())

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class Advantage:
    """Column `advantage`: advantages of the samples or tokens of a row.

    Attributes:
        values: `[n] float32`, one for each sample, or `[total] float32`, one for each token in the layout of the
            trajectory's tokens; 0 for a greedy baseline sample.
        reward: mean reward of the samples.
        returns: `[total] float32`, targets of a critic; None without a critic.
        lengths: `[n] int32`, tokens of each sample that token rewards were given for; compared with the trajectory
            before the row is trained.
        components: name -> mean of a reward component over the samples, for the metrics of the step.
        rewards: `[n] float64`, shaped rewards of the samples; None unless statistics of the step need them. `values`
            are then float64, and rounded after these statistics.
        kl: mean KL of a sample, summed over its trained tokens, before the coefficient; None if the reward has no KL.
        role: role that the samples play (`metadata["role"]` of the prompt), for `algorithm.advantage = "ema"`.
        per_token: whether `values` has one number for each token; read only where a row has as many tokens as samples.
        correct: `[n] bool`, samples that the loss imitates; None without `algorithm.positive_nll`.

    Raises:
        ValueError: a number is not finite, or an array has more than one dimension.
    """

    values: Array
    reward: float
    returns: Array | None = None
    lengths: Array | None = None
    components: dict[str, float] = field(default_factory=dict)
    rewards: Array | None = None
    kl: float | None = None
    role: str = ""
    per_token: bool = False
    correct: Array | None = None

    def __post_init__(self) -> None:
        _check_numbers(self.values, "a row's advantage")
        if self.correct is not None and (self.correct.ndim != 1 or self.correct.dtype != np.bool_):
            msg = f"correct samples of an advantage are {self.correct.dtype}{list(self.correct.shape)}, not [n] bool"
            raise ValueError(msg)
        if not np.isfinite(self.reward):
            msg = f"mean reward of a row is {self.reward}"
            raise ValueError(msg)
        for name, mean in self.components.items():
            if not np.isfinite(mean):
                msg = f"mean of reward component {name[:80]!r} of a row is {mean}"
                raise ValueError(msg)
        if self.returns is not None:
            _check_numbers(self.returns, "returns of a row")
        if self.rewards is not None:
            _check_numbers(self.rewards, "rewards of an advantage")
        if self.kl is not None and not np.isfinite(self.kl):
            msg = f"KL of a row is {self.kl}"
            raise ValueError(msg)
        if self.lengths is not None and (self.lengths.ndim != 1 or self.lengths.dtype != np.int32):
            msg = f"lengths of an advantage are {self.lengths.dtype}{list(self.lengths.shape)}, not [n] int32"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Dropped:
    """Column `dropped`: why the row left the run untrained; `reason` is usually a `DropReason`."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Column `quarantined`: the role that failed, its attempts, and the last error."""

    role: str
    deliveries: int
    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Requeued:
    """Column `requeued` of a quarantined row: its task will be admitted again."""

    unix_time: float


@dataclass(frozen=True, slots=True)
class Redelivery:
    """Column `redeliver-<role>`: the role gets a row that it lost again."""

    role: str
    stored_at: int
    """Stream sequence of the input whose message was acknowledged."""


@dataclass(frozen=True, slots=True)
class Readmitted:
    """Column `readmitted` of a requeued row: the new row with its task."""

    row: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Cell `batch.<step>`: rows of a step, in order, written before the optimizer step.

    Attributes:
        rows: indices of the rows within the step.
        seed: seed of the step.
        incarnation: incarnation of the trainer that wrote the cell.
        reward: mean reward of all samples.
        staleness: version of the trainer minus the oldest version that sampled a token of any row.
        tokens: number of trained tokens.
        unix_time: seconds since 1970.
        digests: 32-bit digest of the content of each row's cell, in the order of `rows`, by column that the step reads;
            see `training.row_digests`. The author of a cell and the place of its arrays do not count.
    """

    rows: list[int]
    seed: int
    incarnation: int
    reward: float
    staleness: int
    tokens: int
    unix_time: float
    digests: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a weight version: path relative to the store, size in bytes, checksum."""

    path: str
    nbytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Weights:
    """Cell `weights.<version>`: published when all files of the version are in the store.

    `base_version` is the version that the files are a delta to; None for a full set. `kl_coefficient` is that of the KL
    in the reward of rows whose newest token this version sampled; None where it does not adapt. `tensors` holds 2 bytes
    for each tensor in the order of the names, a digest of the tensors up to it: the first pair that differs from those
    of other weights names the first tensor that differs. Empty if the engine gives none.
    """

    version: int
    fingerprint: str
    shards: list[Shard]
    incarnation: int
    base_version: int | None = None
    kl_coefficient: float | None = None
    tensors: bytes = b""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Counts of the rows below the floor, by how they ended."""

    admitted: int = 0
    trained: int = 0
    dropped: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Cell `checkpoint.<version>`; `totals` counts the deleted rows below `floor`.

    Cell `critic_checkpoint.<version>` is one of the critic: its `floor` is the version, and it deletes no rows.
    `device` computed it: "cpu", or "cuda" with the name of the GPU; empty if it is unknown.
    """

    version: int
    path: str
    fingerprint: str
    floor: int
    totals: RowCounts = field(default_factory=RowCounts)
    incarnation: int = 0
    device: str = ""


@dataclass(frozen=True, slots=True)
class CriticVersion:
    """Cell `critic.<version>`: fingerprint of the critic before step `version`."""

    version: int
    fingerprint: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class SetResult:
    """Result of a set of held-out rows.

    Attributes:
        rows: rows that were scored.
        reward: mean of their mean rewards.
        accuracy: mean share of their answers that pass; None where nothing can pass.
    """

    rows: int
    reward: float
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Cell `evaluation.<version>`: mean reward of `rows` scored held-out rows, and by set.

    The answers are in the file `evaluations/<version>.jsonl` of the evaluator's run folder.
    """

    version: int
    reward: float
    rows: int
    sets: dict[str, SetResult]
