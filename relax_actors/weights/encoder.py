"""The sending side of weights: a model's tensors in the dtype that is published, whole or as what changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from relax_actors.weights import deltas
from relax_actors.weights import files as weights
from relax_actors.weights.protocol import Content

WORTH_IT = 0.5
"""A delta that is longer than this part of the whole is not worth the work of applying it."""


class WeightEncoder:
    """What a trainer gives out of one model.

    Args:
        read: the weights as they are now, in the published dtype, by their Hugging Face names.
        remembers: whether to keep a copy of what was published, on its device, to tell what changed since.
    """

    def __init__(self, read: Callable[[], dict[str, Tensor]], *, remembers: bool) -> None:
        self._read = read
        self._remembers = remembers
        self._now: dict[str, Tensor] | None = None
        self._fingerprint: str | None = None
        self._base: tuple[str, dict[str, Tensor]] | None = None
        self._delta: Content | None = None

    def changed(self) -> None:
        """The model's weights are others now."""
        self._now = self._fingerprint = self._delta = None

    @property
    def _tensors(self) -> dict[str, Tensor]:
        if self._now is None:
            self._now = self._read()
        return self._now

    def fingerprint(self) -> str:
        """Fingerprint of the weights as they are published."""
        if self._fingerprint is None:
            self._fingerprint = weights.fingerprint(self._tensors.items())
        return self._fingerprint

    def whole(self, path: Path) -> str:
        """Write all weights; gives their fingerprint."""
        weights.save(self._tensors, path)
        return self.fingerprint()

    def delta(self) -> Callable[[Path], str] | None:
        """What writes the difference to what is remembered, as `whole` does; None if that is not worth it."""
        if self._base is None:
            return None
        base, known = self._base
        found = deltas.encode(known, self._tensors)
        if deltas.nbytes(found) > WORTH_IT * deltas.nbytes(self._tensors):
            return None
        return partial(self._write_delta, found, base)

    def _write_delta(self, delta: dict[str, Tensor], base: str, path: Path) -> str:
        weights.save(delta, path, base)
        self._delta = Content(base, delta)
        return self.fingerprint()

    def contents(self) -> list[Content]:
        """The weights in memory, in tensors that no later step changes: a delta if that was written, and all."""
        # What is remembered for the next delta is a copy already.
        now = self._tensors if self._remembers else {name: t.clone() for name, t in self._tensors.items()}
        whole = Content(None, now)
        return [whole] if self._delta is None else [self._delta, whole]

    def remember(self) -> None:
        """Take the weights as they are now for what the next delta is to."""
        if self._remembers:
            self._base = self.fingerprint(), self._tensors
