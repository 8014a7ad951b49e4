"""Micro-batches of packed sequences, and which rank computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from relax_actors.engines.protocols.samples import MicroBatchPlan, TrainSample
from relax_actors.engines.ranks.shares import rows_are_whole
from relax_actors.engines.torch.micro_batch import IDLE, MicroBatch, padded, plans_of_ranks
from relax_actors.engines.torch.sharding import Whole
from relax_actors.media.family import Family


class Planning:
    """Plans and builds micro-batches.

    With `share_prefixes`, a prefix that sequences of a row share is computed once in a micro-batch; with `keeps_rows`,
    one rank computes all sequences of a row.
    """

    def __init__(self, sharding: Whole, family: Family | None, *, share_prefixes: bool, keeps_rows: bool) -> None:
        self._sharding, self._family, self._alone = sharding, family, False
        self._planning = {"share_prefixes": share_prefixes, "keeps_rows": keeps_rows}

    def plan(self, samples: Sequence[TrainSample], max_tokens: int) -> list[MicroBatchPlan]:
        """Return this rank's micro-batches, of at most `max_tokens` tokens; with `IDLE` ones all ranks have as many.

        Raises:
            ValueError: a sequence is empty, or longer than `max_tokens`.
        """
        plans = self._plans(samples, max_tokens)
        return plans[self._sharding.rank] + [IDLE] * (max(map(len, plans)) - len(plans[self._sharding.rank]))

    def keeps_rows(self, samples: Sequence[TrainSample], max_tokens: int) -> bool:
        """Whether all sequences of each row are in one micro-batch of one rank."""
        return rows_are_whole(samples, [plan.indices for plans in self._plans(samples, max_tokens) for plan in plans])

    def _plans(self, samples: Sequence[TrainSample], max_tokens: int) -> list[list[MicroBatchPlan]]:
        return plans_of_ranks(samples, self._sharding.count, max_tokens, alone=self._alone, **self._planning)

    def micro_batch(self, samples: Sequence[TrainSample], plan: MicroBatchPlan) -> MicroBatch:
        """Build the micro-batch of the sequences that a plan names."""
        return MicroBatch.of(samples, plan, self._sharding.device, self._family)

    def padded(self, arrays: Sequence[NDArray[Any]], width: int) -> Tensor:
        """Pad values of trained tokens on the device; see `padded`."""
        return padded(arrays, width).to(self._sharding.device)
