"""Head of a record: its row and reward, without its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from relax_actors.traces.plain import is_number


@dataclass(frozen=True, slots=True)
class Head:
    """What finds the row of a trace.

    Attributes:
        row: what the traces of a row have in common: run and row, or else a checksum of the prompt; empty if unknown.
        reward: -inf for a greedy sample or one without a reward, +inf for one whose reward is no number.
    """

    row: str
    reward: float


def head_of(record: Mapping[str, Any], prompt: object) -> Head:
    """Return a record's head: known ones of `run`, `row`, `reward` and `greedy`."""
    run, row, reward = record.get("run"), record.get("row"), record.get("reward")
    name = f"{run}/{row}" if row else _checksum(prompt)
    if reward is None or record.get("greedy"):
        return Head(name, -math.inf)
    return Head(name, float(reward) if is_number(reward) and math.isfinite(reward) else math.inf)


def _checksum(prompt: object) -> str:
    """Return the checksum of token ids; empty if they are none."""
    if not isinstance(prompt, list) or not prompt:
        return ""
    try:
        return xxhash.xxh3_128_hexdigest(np.array(prompt, np.int32).tobytes())
    except (TypeError, ValueError, OverflowError):
        return ""
