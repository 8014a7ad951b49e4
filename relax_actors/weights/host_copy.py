"""Verified copy of weights in host memory, advanced by full sets and deltas."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from relax_actors.errors import StoreError
from relax_actors.weights import deltas
from relax_actors.weights import files as weights
from relax_actors.weights.protocols import WeightUpdate


class HostCopy:
    """Weights of one version in the published dtype; implements `WeightCopy`.

    Invariant: the copy is empty, or its tensors have the published fingerprint.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.fingerprint = ""
        self.tensors: dict[str, Tensor] = {}

    def apply(self, updates: Sequence[WeightUpdate]) -> None:
        """Advance to the last of `updates`; see `WeightCopy`.

        Deltas are applied in place. Only the last fingerprint is checked: it depends on all updates before it.
        """
        tensors, base = self.tensors, self.fingerprint
        self.version, self.fingerprint, self.tensors = None, "", {}
        for update in updates:
            bases = {weights.delta_base(shard) for shard in update.shards}
            if bases == {None}:
                tensors = weights.load(update.shards)
            elif bases == {base}:
                deltas.apply(tensors, weights.load(update.shards))
            else:
                wanted = sorted(map(str, bases))
                held = base or "nothing"
                msg = f"weights {update.version} are a delta to {wanted}, the copy holds {held}; begin with a full set"
                raise StoreError(msg)
            base = update.fingerprint
        last = updates[-1]
        if (fingerprint := weights.fingerprint(tensors)) != last.fingerprint:
            msg = f"weights {last.version} have fingerprint {fingerprint}, published was {last.fingerprint}; not loaded"
            raise StoreError(msg)
        self.version, self.fingerprint, self.tensors = last.version, last.fingerprint, tensors
