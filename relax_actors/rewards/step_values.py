"""Numbers that are rewards, from the scores of a reward model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Value = Literal["auto", "score", "probability"]


def value_of(scores: Array, value: Value, label: int | None) -> Array:
    """Return the value of each answer or step, `[scores] float32`.

    Args:
        scores: `[scores, classes] float32`.
        value: the score, of several classes the log-odds of `label`; or the probability of `label`; "auto" is the score
            of one class, and the probability of several.
        label: class that counts, of several; the last one if None.
    """
    wide = scores.astype(np.float64)
    classes = wide.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):
        if classes == 1:
            odds = wide[:, 0]
        else:
            chosen = classes - 1 if label is None else label
            odds = wide[:, chosen] - np.logaddexp.reduce(np.delete(wide, chosen, axis=1), axis=1)
        if value == "score" or (value == "auto" and classes == 1):
            return odds.astype(np.float32)
        probabilities: Array = (1.0 / (1.0 + np.exp(-odds))).astype(np.float32)
        return probabilities


def value_of_steps(values: Array, steps: str) -> float:
    """Return an answer's value from its steps: "min", "mean", "product" or "last"."""
    reduce: dict[str, Callable[[Array], Any]] = {"min": np.min, "mean": np.mean, "product": np.prod}
    return float(reduce[steps](values)) if steps in reduce else float(values[-1])


def token_values(values: Array, ends: Sequence[int], ids: Array, decode: Callable[[Any], str]) -> Array:
    """Give the value of each step to the token of the policy that ends it, `[tokens] float32`.

    Args:
        values: `[steps] float32`.
        ends: `[steps]`, characters of the answer's text up to the end of each step.
        ids: `[tokens]`, tokens of the answer, by the policy's tokenizer.
        decode: text of tokens, as in the answer's text.
    """
    tokens = np.zeros(len(ids), np.float32)
    for value, end in zip(values.tolist(), ends, strict=True):
        place = bisect_left(range(1, len(ids) + 1), end, key=lambda count: len(decode(ids[:count])))
        if len(ids):
            tokens[min(place, len(ids) - 1)] += value
    return tokens
