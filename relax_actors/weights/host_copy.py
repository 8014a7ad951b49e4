"""The receiving side of weights: a verified copy in host memory, which files bring from version to version."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from relax_actors.errors import StoreError
from relax_actors.weights import deltas
from relax_actors.weights import files as weights
from relax_actors.weights.protocol import Step


class HostCopy:
    """Weights of one version in the dtype in which they were published.

    Invariant: what is here has been verified against the fingerprint that was published, or nothing is here.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.fingerprint = ""
        self.tensors: dict[str, Tensor] = {}

    def take(self, way: Sequence[Step]) -> None:
        """Go to the end of a way; see `WeightsCopy`.

        Deltas are applied in place; only the end of the way is verified, for it vouches for all before it.
        """
        tensors, base = self.tensors, self.fingerprint
        self.version, self.fingerprint, self.tensors = None, "", {}
        for step in way:
            content = step.content
            applies_to = {content.base} if content else {weights.base_of(shard) for shard in step.shards}
            if applies_to == {None}:
                tensors = _read(step)
            elif applies_to == {base}:
                deltas.apply(tensors, _read(step))
            else:
                wanted = sorted(map(str, applies_to))
                here = base or "nothing"
                msg = f"weights {step.version} are a delta to {wanted}, here is {here}; begin with a whole set"
                raise StoreError(msg)
            base = step.fingerprint
        last = way[-1]
        if (found := weights.fingerprint(tensors.items())) != last.fingerprint:
            msg = f"weights {last.version} have fingerprint {found}, published was {last.fingerprint}; not loaded"
            raise StoreError(msg)
        self.version, self.fingerprint, self.tensors = last.version, last.fingerprint, tensors


def _read(step: Step) -> dict[str, Tensor]:
    return weights.load(step.shards) if step.content is None else dict(step.content.tensors)
