"""Column `teacher`: what a teacher model thinks of the tokens of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """Log-probs of a teacher for a row's trained tokens, in the trajectory's layout.

    Attributes:
        logprobs: `[total] float32`, of the tokens themselves; 0 where a token is not trained.
        top_ids: `[trained, k] int32`, the teacher's most likely tokens at each trained token; None without
            `algorithm.distil.top_k`.
        top_logprobs: `[trained, k] float32`, their log-probs.

    Raises:
        ValueError: a number is not finite, or shapes do not match.
    """

    logprobs: Array
    top_ids: Array | None = None
    top_logprobs: Array | None = None

    def __post_init__(self) -> None:
        if self.logprobs.ndim != 1 or self.logprobs.dtype != np.float32 or not np.isfinite(self.logprobs).all():
            actual = f"{self.logprobs.dtype}{list(self.logprobs.shape)}"
            msg = f"log-probs of a teacher are {actual}, not [total] float32, or not finite"
            raise ValueError(msg)
        ids, logprobs = self.top_ids, self.top_logprobs
        if (ids is None) != (logprobs is None):
            msg = "a teacher gives top_ids without top_logprobs, or top_logprobs without top_ids; set both or neither"
            raise ValueError(msg)
        if ids is None or logprobs is None:
            return
        if ids.ndim != 2 or ids.dtype != np.int32 or logprobs.shape != ids.shape:  # noqa: PLR2004 [trained, k]
            shapes = f"{ids.dtype}{list(ids.shape)} and {list(logprobs.shape)}"
            msg = f"top_ids and top_logprobs of a teacher are {shapes}, not [trained, k] of int32 and float32"
            raise ValueError(msg)
        if logprobs.dtype != np.float32 or not np.isfinite(logprobs).all():
            msg = f"top_logprobs of a teacher are {logprobs.dtype} or not finite"
            raise ValueError(msg)

    def problem(self, mask: Array, top_k: int, vocabulary: int) -> str:
        """Return why the scores do not fit the trained tokens of a row; empty if they do.

        Args:
            mask: `[total] bool`, the trained tokens.
            top_k: tokens that the run's loss needs at each trained token; 0 for none.
            vocabulary: size of the student's vocabulary.
        """
        if len(self.logprobs) != len(mask):
            return f"column teacher has {len(self.logprobs)} log-probs for {len(mask)} tokens"
        if not top_k:
            return ""
        trained = int(np.count_nonzero(mask))
        if self.top_ids is None or self.top_ids.shape != (trained, top_k):
            shape = None if self.top_ids is None else list(self.top_ids.shape)
            return f"column teacher has top_ids of shape {shape}; algorithm.distil needs {[trained, top_k]}"
        if self.top_ids.min(initial=0) < 0 or self.top_ids.max(initial=0) >= vocabulary:
            return f"column teacher names tokens outside of the model's vocabulary of {vocabulary}"
        return ""

    def expanded(self, mask: Array) -> tuple[Array, Array] | None:
        """Return `top_ids` and `top_logprobs` as `[total, k]`, 0 if untrained; or None."""
        if self.top_ids is None or self.top_logprobs is None:
            return None
        shape = (len(mask), self.top_ids.shape[1])
        ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        ids[mask], logprobs[mask] = self.top_ids, self.top_logprobs
        return ids, logprobs
