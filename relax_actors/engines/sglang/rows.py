"""The rows that a server has at once, by the order in which they came."""

from __future__ import annotations

from collections.abc import Sequence

from relax_actors.data.model_folder import MoeFacts
from relax_actors.engines.protocols.inference import Generation, GenerationRequest
from relax_actors.engines.sglang.samples import Sample


class Rows:
    """Requests and what there is of their samples, until they have ended.

    Args:
        moe: of the model, if the experts that it chooses are to be told.
    """

    def __init__(self, moe: MoeFacts | None = None) -> None:
        self._moe = moe
        self._came = self._ended_tokens = 0
        self.open: dict[int, list[Sample]] = {}
        """The samples of each row that has not been given out."""

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Take rows in."""
        for request in requests:
            self.open[self._came] = [Sample(request, i, self._moe) for i in range(request.samples)]
            self._came += 1

    @property
    def samples(self) -> list[Sample]:
        """Those of all open rows."""
        return [sample for group in self.open.values() for sample in group]

    @property
    def tokens(self) -> int:
        """Tokens that all rows have by now, those that were given out too."""
        return self._ended_tokens + sum(map(len, self.samples))

    def give(self, i: int) -> tuple[int, list[Generation]]:
        """Give out a row, all of whose samples have ended."""
        group = self.open.pop(i)
        self._ended_tokens += sum(map(len, group))
        return i, [sample.result() for sample in group]
