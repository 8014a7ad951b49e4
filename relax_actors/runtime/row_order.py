"""Which row of the data each row of a run is: a pure function of (run seed, step, index)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from broker.subjects import RowId
from relax_actors.config import Config
from relax_actors.data.mixture import Mixture, plan_of
from relax_actors.data.source import Blocks, DataSource, blocks_of
from relax_actors.runtime.permutation import permuted
from relax_actors.runtime.seeds import derive_seed


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
        """Return the item of the data for a row. A successor gets any item of the source of the row before it."""
        slot = row.step * self._rows + row.index % self._rows
        k, ordinal = (0, slot) if self._plan is None else self._plan.at(slot)
        part = self._parts[k]
        if row.index >= self._rows:
            return part.start + derive_seed(self._seed, "successor", row.step, row.index) % part.size
        epoch, place = divmod(ordinal, part.size)
        return part.start + (self._shuffled(part, epoch, place) if self._shuffles else place)

    def _shuffled(self, part: Part, epoch: int, place: int) -> int:
        """Return an item of a part: a permutation, or one in windows of as many blocks as a source holds."""
        named = (part.name,) if part.name else ()
        seed = derive_seed(self._seed, "epoch", epoch, *named)
        if part.blocks is None or len(part.blocks.sizes) <= part.blocks.held:
            return permuted(seed, part.size, place)
        return self._windows(part.blocks, seed).item(place)
