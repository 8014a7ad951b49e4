"""Token sequence that grows by turns and observations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.messages import NOT_SAMPLED, ObservedMedia, TokenSequence

Array = NDArray[Any]


@dataclass(slots=True)
class GrowingSequence:
    """Tokens of a sequence so far, in parts: an observation or a turn each."""

    tokens: list[Array]
    logprobs: list[Array]
    versions: list[Array]
    spans: list[tuple[int, int]] = field(default_factory=list)
    observed: list[ObservedMedia] = field(default_factory=list)
    length: int = 0

    @classmethod
    def of(cls, tokens: Array, observed: ObservedMedia | None = None) -> GrowingSequence:
        """Return a sequence that begins with tokens that were read."""
        found = cls([], [], [])
        found.read(tokens, observed)
        return found

    def read(self, tokens: Array, observed: ObservedMedia | None = None) -> None:
        """Append tokens that no policy sampled; `observed` holds their media."""
        n = len(tokens)
        if observed is not None:
            self.observed.append(observed)
        self._add(tokens.astype(np.int32), np.zeros(n, np.float32), np.full(n, NOT_SAMPLED, np.int32))

    def write(self, tokens: Array, logprobs: Array, versions: Array) -> None:
        """Append sampled tokens."""
        self.spans.append((self.length, self.length + len(tokens)))
        self._add(tokens.astype(np.int32), logprobs.astype(np.float32), versions.astype(np.int32))

    def drop_last(self) -> None:
        """Remove the last part, which was read."""
        for parts in (self.tokens, self.logprobs, self.versions):
            removed = parts.pop()
        self.length -= len(removed)
        self.observed = [one for one in self.observed if one.start < self.length]

    def _add(self, *arrays: Array) -> None:
        for parts, array in zip((self.tokens, self.logprobs, self.versions), arrays, strict=True):
            parts.append(array)
        self.length += len(arrays[0])

    @property
    def ids(self) -> Array:
        """All tokens, `[len] int32`."""
        if len(self.tokens) > 1:
            self.tokens[:] = [np.concatenate(self.tokens)]
        return self.tokens[0]

    def built(self, *, trained: bool, player: str = "") -> TokenSequence:
        """Return the sequence of a player as it is stored; its sampled tokens are trained or not."""
        versions = np.concatenate(self.versions)
        mask = (versions >= 0) & trained
        spans = np.array(self.spans, np.int32).reshape(-1, 2)
        logprobs, observed = np.concatenate(self.logprobs), tuple(self.observed)
        return TokenSequence(self.ids, mask, logprobs, versions, spans, None, player, observed)
