"""The work that both sides of `bus.py` get, and how the driver talks to their processes.

Runs in both environments, so it imports nothing but the standard library and NumPy.
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

    `place` says where the side's bus is: a folder, or an address.
    """

    place: str
    samples: int = 64
    group: int = 8
    prompt: int = 256
    response: int = 1024

    @property
    def bytes(self) -> int:
        """Bytes of a batch."""
        return self.samples * (8 * self.prompt + 12 * self.response)

    def json(self) -> str:
        """As text for a command line."""
        return json.dumps(asdict(self))

    def batch(self, number: int) -> dict[str, np.ndarray]:
        """The arrays of a batch, `[samples, length]`; `prompt` begins with its number."""
        return {"prompt": np.full((self.samples, self.prompt), number, np.int64), **_same(self)}

    def total(self, number: int) -> float:
        """What the elements of a batch add up to."""
        count = self.samples * self.response
        return float(number * self.samples * self.prompt) + count * (count - 1)


@cache
def _same(work: Workload) -> dict[str, np.ndarray]:
    """What all batches hold; made once, so that making it is not measured."""
    response = np.arange(work.samples * work.response, dtype=np.int64).reshape(work.samples, work.response)
    return {"response": response, "logprobs": response.astype(np.float32)}


def check(work: Workload, number: int, total: float) -> None:
    """End the process if a batch did not come as it was put; float32 sums are rounded."""
    expected = work.total(number)
    if abs(total - expected) > 1e-4 * expected:
        sys.exit(f"batch {number} adds up to {total}, not {expected}")


def serve(work: dict[str, Callable[[int, int], None]]) -> None:
    """Answer the driver's commands `NAME FIRST COUNT` with the times between which the work was done."""
    print(MARK + "ready", flush=True)
    for line in sys.stdin:
        name, first, count = line.split()
        began = time.monotonic()
        work[name](int(first), int(count))
        print(MARK + json.dumps({"began": began, "ended": time.monotonic()}), flush=True)


def arguments() -> tuple[str, Any]:
    """The role and the workload from the command line."""
    return sys.argv[1], Workload(**json.loads(sys.argv[2]))
