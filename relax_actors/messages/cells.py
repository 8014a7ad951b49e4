"""The cells that the built-in roles exchange, one dataclass a column.

Arrays are NumPy, so that no role has to import torch to read a row. `n` is the number of samples of a
row, `total` the number of generated tokens of all its samples, laid end to end in sample order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.messages.experts import expanded

Array = NDArray[Any]


def _check_numbers(values: Array, what: str) -> None:
    """Raise ValueError unless an array is `[n]`, one number a sample, finite in float32."""
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "fiu":
        msg = f"{what} is {values.dtype}{list(values.shape)}, not one number a sample"
        raise ValueError(msg)
    with np.errstate(over="ignore"):
        if not np.isfinite(values.astype(np.float32)).all():
            msg = f"{what} is not finite: {values[:8]}"
            raise ValueError(msg)


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


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
class Sample:
    """One sample of a trajectory: views into its arrays, each `[len]`."""

    tokens: Array
    logprobs: Array
    versions: Array
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Column `trajectory`: the n samples generated for a prompt.

    `prompt_tokens [prompt_len] int32`; `lengths [n] int32`; `tokens [total] int32`; `logprobs [total] float32`, natural
    log, of the softmax at the sampling temperature (top-p narrows the choice, not these numbers); `versions [total]
    int32`, the version that wrote each token; `texts`, `finish_reasons` one a sample; `fingerprint` of the weights.
    With trainer.router_replay the experts that were chosen, as `messages.experts` keeps them, uint8 or int16:
    `prompt_experts [1 or n, prompt_len - 1, layers, top_k]` for the prompt's tokens but the last, and `routed_experts
    [total, layers, top_k]` for the token before each generated one, in the pass that gave that one.
    """

    prompt_tokens: Array
    lengths: Array
    tokens: Array
    logprobs: Array
    versions: Array
    texts: list[str]
    finish_reasons: list[str]
    fingerprint: str
    prompt_experts: Array | None = None
    routed_experts: Array | None = None

    def __post_init__(self) -> None:
        flat = (self.prompt_tokens, self.lengths, self.tokens, self.versions)
        if any(a.ndim != 1 or a.dtype.kind not in "iu" for a in flat):
            msg = "a trajectory's arrays have one dimension, and all but logprobs hold integers"
            raise ValueError(msg)
        if self.logprobs.ndim != 1 or self.logprobs.dtype.kind != "f":
            msg = "the logprobs of a trajectory have one dimension and are floats"
            raise ValueError(msg)
        if unknown := set(self.finish_reasons) - set(FinishReason):
            msg = f"unknown finish reasons {sorted(unknown)}"
            raise ValueError(msg)
        n, total = len(self.lengths), int(self.lengths.sum())
        if (self.lengths < 0).any() or {len(self.texts), len(self.finish_reasons)} != {n}:
            msg = f"{n} lengths, {len(self.texts)} texts and {len(self.finish_reasons)} finish reasons do not agree"
            raise ValueError(msg)
        if {len(self.tokens), len(self.logprobs), len(self.versions)} != {total}:
            msg = f"arrays of {len(self.tokens)}, {len(self.logprobs)}, {len(self.versions)} do not hold {total} tokens"
            raise ValueError(msg)
        self._check_experts(n, total)

    def _check_experts(self, n: int, total: int) -> None:
        """Raise ValueError unless the arrays of experts are both there and fit the tokens, or neither is."""
        prompt, routed = self.prompt_experts, self.routed_experts
        if prompt is None and routed is None:
            return
        if prompt is None or routed is None or {prompt.dtype, routed.dtype} - {np.dtype("u1"), np.dtype("i2")}:
            msg = "a trajectory has prompt_experts and routed_experts, of uint8 or int16, or neither"
            raise ValueError(msg)
        shapes = [(rows, max(0, len(self.prompt_tokens) - 1), *routed.shape[1:]) for rows in (1, n)]
        if routed.ndim != 3 or len(routed) != total or prompt.shape not in shapes:  # noqa: PLR2004
            msg = f"experts {list(prompt.shape)} and {list(routed.shape)} do not fit {total} tokens of {n} samples"
            raise ValueError(msg)

    @property
    def experts(self) -> list[Array] | None:
        """What was chosen for each sample's tokens but the last, `[prompt_len + len - 1, layers, top_k] int16`."""
        if self.prompt_experts is None or self.routed_experts is None:
            return None
        prompts, routed = expanded(self.prompt_experts), expanded(self.routed_experts)
        parts = np.split(routed, np.cumsum(self.lengths)[:-1])
        return [np.concatenate([prompts[min(i, len(prompts) - 1)], part]) for i, part in enumerate(parts)]

    @property
    def samples(self) -> list[Sample]:
        """The samples, as views."""
        return list(self._samples())

    def _samples(self) -> Iterator[Sample]:
        ends = np.cumsum(self.lengths)
        for i, (end, length) in enumerate(zip(ends, self.lengths, strict=True)):
            part = slice(int(end - length), int(end))
            reason = FinishReason(self.finish_reasons[i])
            yield Sample(self.tokens[part], self.logprobs[part], self.versions[part], self.texts[i], reason)


@dataclass(frozen=True, slots=True)
class Reward:
    """Column `reward`: `values [n] float32`, finite, higher is better; iterate over it for plain floats."""

    values: Array

    def __post_init__(self) -> None:
        _check_numbers(self.values, "a row's reward")

    def __iter__(self) -> Iterator[float]:
        return iter(self.values.tolist())

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class Advantage:
    """Column `advantage`: `values [n] float32`, one for all tokens of a sample; `reward` the row's mean reward."""

    values: Array
    reward: float

    def __post_init__(self) -> None:
        _check_numbers(self.values, "a row's advantage")
        if not np.isfinite(self.reward):
            msg = f"mean reward of a row is {self.reward}"
            raise ValueError(msg)


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
class Totals:
    """Rows below the floor by how they ended."""

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
    totals: Totals = field(default_factory=Totals)
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Cell `evaluation.<version>`: mean reward of the version's `rows` held-out rows that could be scored."""

    version: int
    reward: float
    rows: int
