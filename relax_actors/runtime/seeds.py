"""Seeds of all random choices, from (run seed, step, index) alone, so that a restarted actor repeats its choices."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from broker.subjects import RowId


def derive_seed(run_seed: int, *parts: int | str) -> int:
    """Derive a 63-bit seed from the run's seed and the parts that name the choice."""
    text = "|".join(map(str, (run_seed, *parts))).encode()
    return xxhash.xxh3_64_intdigest(text) >> 1


@lru_cache(maxsize=4)
def _order(run_seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    generator = np.random.Generator(np.random.Philox(key=derive_seed(run_seed, "epoch", epoch)))
    return generator.permutation(size)


def task_index(run_seed: int, row: RowId, rows: int, size: int) -> int:
    """Return the task of a row, below `size`. Each task comes once an epoch, in a new order; a successor gets any.

    Args:
        run_seed: the run's seed.
        row: the row; an index of `rows` or above is a successor.
        rows: slots of a step (`trainer.prompts_per_step`).
        size: number of tasks.
    """
    if row.index >= rows:
        return derive_seed(run_seed, "successor", row.step, row.index) % size
    epoch, place = divmod(row.step * rows + row.index, size)
    return int(_order(run_seed, epoch, size)[place])
