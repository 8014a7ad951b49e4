"""Published weights of a model whose rows are on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from relax_actors.engines.ranks.dealing import Entry, deal
from relax_actors.engines.torch.sharding import Whole
from relax_actors.weights import files as weights
from relax_actors.weights.encoder import Take, published_dtype


class SharedSource:
    """Weights of a model whose rows are on several ranks; implements `WeightSource`.

    All ranks gather one tensor after the other; the rank that owns it keeps it. The weights are looked up once, before
    any pass: within one, FSDP2 would stop it to shard the model again. Training changes them in place. `gather` returns
    a whole tensor in a dtype; collective. `lock` is held while they are read.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        ranks: Whole,
        gather: Callable[[Tensor, torch.dtype], Tensor],
        lock: AbstractContextManager[Any],
    ) -> None:
        self._tensors, self._dtype = dict(sorted(tensors.items())), dtype
        self._sharding, self._gather, self._lock = ranks, gather, lock
        self.rank, self.ranks = ranks.rank, ranks.count
        self.prefixes = b""

    def _owners(self, files: int) -> dict[str, int]:
        entries = [Entry(tensor.numel(), range(self.ranks)) for tensor in self._tensors.values()]
        return dict(zip(self._tensors, deal(entries, files), strict=True))

    def forms(self, files: int) -> Mapping[str, weights.TensorForm]:
        """Return the forms of the tensors that this rank owns; see `WeightSource`."""
        owners = self._owners(files)
        return {
            name: weights.TensorForm(published_dtype(name, self._dtype), tuple(tensor.shape))
            for name, tensor in self._tensors.items()
            if owners[name] == self.rank
        }

    @torch.no_grad()
    def visit(self, take: Take, files: int) -> str:
        """Gather each tensor, and pass it to `take` of the rank that owns it; see `WeightSource`."""
        with self._lock:
            return self._visit(take, files)

    def _visit(self, take: Take, files: int) -> str:
        owners, digest = self._owners(files), weights.Fingerprint()
        failure: Exception | None = None
        for name, tensor in self._tensors.items():
            whole = self._gather(tensor, published_dtype(name, self._dtype))
            if self.rank == 0:
                digest.add(name, whole)
            if self.rank == owners[name] and failure is None:
                try:
                    take(name, whole)
                except Exception as error:  # noqa: BLE001 raised below: the other ranks need this one until then
                    failure = error
        self.prefixes = digest.prefixes
        (fingerprint, *_) = self._sharding.all_gather(digest.hexdigest())
        if failure is not None:
            raise failure
        return str(fingerprint)

    def total(self, number: int) -> int:
        """Return the sum of a number over all ranks."""
        return sum(self._sharding.all_gather(number))
