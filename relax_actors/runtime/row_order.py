"""Which row of the data each row of a run is: a pure function of (run seed, step, index)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from broker.subjects import RowId
from relax_actors.config import Config
from relax_actors.data.mixture import Mixture, plan_of
from relax_actors.data.source import Blocks, DataSource, blocks_of
from relax_actors.runtime.seeds import derive_seed

LISTED = 1 << 16
"""Size up to which a permutation is a list, which NumPy makes; larger ones are computed item by item."""
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Part:
    """Items of the data that are passed together: each comes once in `size` rows of the part.

    Attributes:
        name: name of a source of a mixture; empty if there is one part.
        start: first item.
        size: number of items.
        blocks: ranges of items that are cheap to read together; None if all are.
    """

    name: str
    start: int
    size: int
    blocks: Blocks | None = None


class _Windows:
    """Blocks in random order, and their items in random order within windows of some blocks."""

    def __init__(self, blocks: Blocks, seed: int) -> None:
        self._seed, sizes, held = seed, blocks.sizes, blocks.held
        order = np.array([permuted(seed, len(sizes), i) for i in range(len(sizes))])
        # First item, in the data, of each block in the new order; and the items before each block in the new order.
        self._first = (np.cumsum(sizes) - sizes)[order]
        self._before = np.concatenate([[0], np.cumsum(sizes[order])])
        self._windows = self._before[[*range(0, len(sizes), held), len(sizes)]]

    def item(self, place: int) -> int:
        """Return the item of a place."""
        window = int(np.searchsorted(self._windows, place, "right")) - 1
        start, end = self._windows[window : window + 2].tolist()
        within = start + permuted(derive_seed(self._seed, "window", window), end - start, place - start)
        block = int(np.searchsorted(self._before, within, "right")) - 1
        return int(self._first[block] + within - self._before[block])


class RowOrder:
    """Order of the rows of a run; a restarted run has the same."""

    def __init__(self, config: Config, source: DataSource) -> None:
        self._seed, self._rows = config.run.seed, config.trainer.prompts_per_step
        self._shuffles = config.data.shuffle
        self._plan = plan_of(config.data, self._rows)
        if self._plan is not None and isinstance(source, Mixture):
            self._parts = [
                Part(name, start, len(part), blocks_of(part))
                for (name, part), start in zip(source.parts.items(), source.starts, strict=False)
            ]
        else:
            self._parts = [Part("", 0, len(source), blocks_of(source))]
        # Rows of two epochs are in flight at the end of one.
        self._windows = lru_cache(maxsize=2 * len(self._parts))(_Windows)

    def item(self, row: RowId) -> int:
        """Return the data item of a row; a successor gets an item of the same source."""
        slot = row.step * self._rows + row.index % self._rows
        k, ordinal = (0, slot) if self._plan is None else self._plan.at(slot)
        part = self._parts[k]
        if row.index >= self._rows:
            return part.start + derive_seed(self._seed, "successor", row.step, row.index) % part.size
        epoch, place = divmod(ordinal, part.size)
        return part.start + (self._shuffled(part, epoch, place) if self._shuffles else place)

    def _shuffled(self, part: Part, epoch: int, place: int) -> int:
        """Return an item of a part: a permutation, or one within windows of blocks."""
        named = (part.name,) if part.name else ()
        seed = derive_seed(self._seed, "epoch", epoch, *named)
        if part.blocks is None or len(part.blocks.sizes) <= part.blocks.held:
            return permuted(seed, part.size, place)
        return self._windows(part.blocks, seed).item(place)


def permuted(seed: int, size: int, i: int) -> int:
    """Return item `i` of the permutation of `range(size)` that belongs to a seed below 2**64."""
    return int(_listed(seed, size)[i]) if size <= LISTED else _computed(seed, size, i)


@lru_cache(maxsize=32)
def _listed(seed: int, size: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(key=seed)).permutation(size)


def _computed(seed: int, size: int, i: int) -> int:
    """Return item i of a Feistel network over the next power of 4, walked until below `size`.

    J. Black and P. Rogaway, "Ciphers with arbitrary finite domains" (2002), section 4: as the network permutes its
    domain, the first value below `size` on the cycle from each i is another one.
    """
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for number in range(_ROUNDS):
            mixed = xxhash.xxh3_64_intdigest(struct.pack("<QQB", seed, right, number))
            left, right = right, left ^ (mixed & mask)
        i = left << half | right
        if i < size:
            return i
