"""Workload of both sides of `bus.py`, and the protocol between the driver and their processes.

Runs in both environments, so it imports only the standard library and NumPy.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

MARK = "@bus "


@dataclass(frozen=True, slots=True)
class Workload:
    """Batches of `samples` samples in groups of `group`: prompt and response int64, log-probs float32.

    `place` is the folder or the address of the side's bus.
    """

    place: str
    samples: int = 64
    group: int = 8
    prompt: int = 256
    response: int = 1024

    @property
    def bytes(self) -> int:
        """Bytes of one batch."""
        return self.samples * (8 * self.prompt + 12 * self.response)

    def json(self) -> str:
        """The workload as text for a command line."""
        return json.dumps(asdict(self))

    def batch(self, number: int) -> dict[str, np.ndarray]:
        """Arrays of a batch, `[samples, length]`; every element of `prompt` is the batch's number."""
        return {"prompt": np.full((self.samples, self.prompt), number, np.int64), **_same(self)}

    def total(self, number: int) -> float:
        """Sum of all elements of a batch."""
        count = self.samples * self.response
        return float(number * self.samples * self.prompt) + count * (count - 1)


@cache
def _same(work: Workload) -> dict[str, np.ndarray]:
    """Arrays common to all batches, created once so that their creation is not measured."""
    response = np.arange(work.samples * work.response, dtype=np.int64).reshape(work.samples, work.response)
    return {"response": response, "logprobs": response.astype(np.float32)}


def check(work: Workload, number: int, total: float) -> None:
    """Exit if a batch differs from the one that was put; float32 sums are rounded."""
    expected = work.total(number)
    if abs(total - expected) > 1e-4 * expected:
        sys.exit(f"batch {number} adds up to {total}, not {expected}")


def serve(work: dict[str, Callable[[int, int], None]]) -> None:
    """Answer the driver's commands `NAME FIRST COUNT` with the start and end times of the work."""
    print(MARK + "ready", flush=True)
    for line in sys.stdin:
        name, first, count = line.split()
        began = time.monotonic()
        work[name](int(first), int(count))
        print(MARK + json.dumps({"began": began, "ended": time.monotonic()}), flush=True)


def arguments() -> tuple[str, Any]:
    """Return the role and the workload from the command line."""
    return sys.argv[1], Workload(**json.loads(sys.argv[2]))
