"""Rows that a server is generating, numbered in the order of their arrival."""

from __future__ import annotations

from collections.abc import Sequence

from relax_actors.data.model_folder import MoeFacts
from relax_actors.engines.protocols.inference import Generation, GenerationRequest
from relax_actors.engines.protocols.watch import Watch
from relax_actors.engines.sglang.media_reference import MediaReferences
from relax_actors.engines.sglang.partial_sample import PartialSample


class ActiveRows:
    """Requests with the samples generated so far.

    Args:
        moe: of the model, if its chosen experts are recorded.
        media: makes the references to media of prompts; None for a model that reads text only.
    """

    def __init__(self, moe: MoeFacts | None = None, media: MediaReferences | None = None) -> None:
        self._moe, self._media = moe, media
        self._added = self._finished_tokens = 0
        self._watched: dict[int, Watch] = {}
        self.active: dict[int, list[PartialSample]] = {}
        """Samples of each row that was not returned yet."""

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Add rows."""
        for request in requests:
            media = None if self._media is None else self._media.of(request.tokens, request.media)
            self.active[self._added] = [PartialSample(request, i, self._moe, media) for i in range(request.samples)]
            if request.watch is not None:
                self._watched[self._added] = request.watch
            self._added += 1

    @property
    def samples(self) -> list[PartialSample]:
        """Samples of all active rows."""
        return [sample for group in self.active.values() for sample in group]

    @property
    def tokens(self) -> int:
        """Number of tokens generated for all rows, active and finished."""
        return self._finished_tokens + sum(map(len, self.samples))

    def inform(self) -> list[int]:
        """Show new tokens to the watches of rows; return the rows that nobody waits for."""
        for i, watch in self._watched.items():
            if watch.wants_tokens:
                self.active[i][0].inform(watch)
        return [i for i, watch in self._watched.items() if watch.is_cancelled]

    def finish(self, i: int) -> tuple[int, list[Generation]]:
        """Remove row `i`, all of whose samples have ended; return its number and its samples."""
        group = self.active.pop(i)
        self._watched.pop(i, None)
        self._finished_tokens += sum(map(len, group))
        return i, [sample.result() for sample in group]
