"""Verified copy of weights in host memory, advanced by full sets and deltas."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from relax_actors.errors import ActorError, StoreError
from relax_actors.weights import deltas
from relax_actors.weights import files as weights
from relax_actors.weights.node_sets import Named, NodeSets
from relax_actors.weights.protocols import WeightUpdate

Forms = Mapping[str, weights.TensorForm]


class HostCopy:
    """Weights of one version in the published dtype; implements `WeightCopy`.

    With `sets` the copy is one that the actors of a node share, in a file with the names of `named`; see `TensorFile`.
    Otherwise it is this process's: of a full set, the mapped files themselves.

    Invariant: the copy is empty, or its tensors have the published fingerprint. They do not change.
    """

    def __init__(self, sets: NodeSets | None = None, named: Named | None = None) -> None:
        self._sets, self._named = sets, named
        self.version: int | None = None
        self.fingerprint = ""
        self.tensors: Mapping[str, Tensor] = {}

    def apply(self, updates: Sequence[WeightUpdate]) -> None:
        """Advance to the last of `updates`; see `WeightCopy`.

        Only the last fingerprint is checked: it depends on all updates before it.
        """
        before, base, tensors, last = self.version, self.fingerprint, self.tensors, updates[-1]
        self.version, self.fingerprint, self.tensors = None, "", {}

        def source() -> tuple[Forms, Iterator[tuple[str, Tensor]]]:
            whole, chain = _resolved(updates, base, tensors)
            return {name: weights.TensorForm.of(tensor) for name, tensor in whole.items()}, deltas.advanced(
                whole, chain
            )

        try:
            if self._sets is None:
                advanced: Mapping[str, Tensor] = dict(source()[1])
                weights.check(advanced, last.version, last.fingerprint)
            else:
                advanced = self._sets.hold(last.version, last.fingerprint, source, self._named)
        except (OSError, ActorError):  # no room, or no time: the copy is as good as before
            self.version, self.fingerprint, self.tensors = before, base, tensors
            raise
        except StoreError:
            if tensors and weights.fingerprint(tensors) != base:
                msg = (
                    f"the copy of weights {before} on this node has changed on its disk; the next try reads a full set"
                )
                raise StoreError(msg) from OSError(errno.EIO, msg)  # what was published is not at fault
            raise
        self.version, self.fingerprint, self.tensors = last.version, last.fingerprint, advanced


def _resolved(
    updates: Sequence[WeightUpdate], base: str, tensors: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], list[dict[str, Tensor]]]:
    """Return the last full set among the copy's `tensors` and the updates, and the deltas after it.

    Raises:
        StoreError: a file cannot be read, or a delta is to other weights than those before it.
    """
    chain: list[dict[str, Tensor]] = []
    for update in updates:
        bases = {weights.delta_base(shard) for shard in update.shards}
        if bases == {None}:
            tensors, chain = weights.load(update.shards), []
        elif bases == {base}:
            chain.append(weights.load(update.shards))
        else:
            wanted = sorted(map(str, bases))
            held = base or "nothing"
            msg = f"weights {update.version} are a delta to {wanted}, the copy holds {held}; begin with a full set"
            raise StoreError(msg)
        base = update.fingerprint
    return tensors, chain
