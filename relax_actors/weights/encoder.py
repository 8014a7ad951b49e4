"""Encodes a model's weights for publication, as a full set or as a delta."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from relax_actors.weights import deltas
from relax_actors.weights import files as weights

MAX_DELTA_SHARE = 0.5
"""A delta larger than this share of the full set is not worth the work of applying it."""


class WeightEncoder:
    """Fingerprints, full sets and deltas of one model.

    Args:
        read: returns the current weights in the published dtype, by their Hugging Face names.
        keep_base: whether to keep a copy of the last published weights, on their device, to compute deltas.
    """

    def __init__(self, read: Callable[[], dict[str, Tensor]], *, keep_base: bool) -> None:
        self._read = read
        self._keep_base = keep_base
        self._current: dict[str, Tensor] | None = None
        self._fingerprint: str | None = None
        self._base: tuple[str, dict[str, Tensor]] | None = None

    def invalidate(self) -> None:
        """Forget what was read of the model; call it whenever its weights have changed."""
        self._current = self._fingerprint = None

    def copies(self) -> list[Tensor]:
        """Return the copies of weights that it keeps for the next delta, on the device of the model."""
        base = {} if self._base is None else self._base[1]
        return [*base.values(), *(self._current or {}).values()] if self._keep_base else []

    def forget_tensors(self) -> None:
        """Forget the tensors that it read of the model, unless they are kept for the next delta."""
        if not self._keep_base:
            self._current = None

    @property
    def _tensors(self) -> dict[str, Tensor]:
        if self._current is None:
            self._current = self._read()
        return self._current

    def fingerprint(self) -> str:
        """Return the fingerprint of the current weights in the published dtype."""
        if self._fingerprint is None:
            self._fingerprint = weights.fingerprint(self._tensors.items())
        return self._fingerprint

    def write_full(self, path: Path) -> str:
        """Write all weights to `path`; return their fingerprint."""
        weights.save(self._tensors, path)
        return self.fingerprint()

    def delta_writer(self) -> Callable[[Path], str] | None:
        """Return a function that writes the delta to the base, as `write_full` does.

        None if there is no base, or if the delta is too large to pay off.
        """
        if self._base is None:
            return None
        fingerprint, base = self._base
        delta = deltas.encode(base, self._tensors)
        if deltas.nbytes(delta) > MAX_DELTA_SHARE * deltas.nbytes(self._tensors):
            return None
        return partial(self._write_delta, delta, fingerprint)

    def _write_delta(self, delta: dict[str, Tensor], base: str, path: Path) -> str:
        weights.save(delta, path, base)
        return self.fingerprint()

    def set_base(self) -> None:
        """Make the current weights the base of the next delta."""
        if self._keep_base:
            self._base = self.fingerprint(), self._tensors
