"""Reference of the KL that a trainer with Megatron-Core computes itself: the weights of version 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor

from relax_actors.engines.megatron.mcore.adapter import MegatronAdapter
from relax_actors.engines.megatron.mcore.model_chunks import ModelChunks
from relax_actors.engines.megatron.mcore.rank_weights import local_shards
from relax_actors.engines.megatron.mcore.shard_files import LocalShard


class Reference(Protocol):
    """Weights of version 0 beside those in training."""

    def take(self) -> None:
        """Make the current weights those of version 0."""

    def models(self) -> AbstractContextManager[Sequence[Any]]:
        """Return a context with the model chunks of this rank that have the weights of version 0."""

    def shards(self) -> Mapping[str, LocalShard]:
        """Return the weights of this rank that a checkpoint holds, by key; empty for none."""

    def resident(self) -> Iterable[Tensor]:
        """Return the tensors on the device besides those of the model in training."""


class ModelReference:
    """A second model; implements `Reference`."""

    def __init__(self, chunks: ModelChunks, trained: ModelChunks) -> None:
        self._chunks, self._trained = chunks, trained
        for model in chunks.wrapped:
            model.train(mode=False)
            model.requires_grad_(False)

    def take(self) -> None:
        """Copy the weights; see `Reference`."""
        for frozen, trained in zip(self._chunks.bare, self._trained.bare, strict=True):
            frozen.load_state_dict(trained.state_dict())
        if self._chunks.towers is not None:
            self._chunks.towers.invalidate()

    @contextmanager
    def models(self) -> Iterator[Sequence[Any]]:
        """Yield the second model; see `Reference`."""
        yield self._chunks.wrapped

    def shards(self) -> Mapping[str, LocalShard]:
        """Return all its weights; see `Reference`."""
        return local_shards(self._chunks.bare)

    def resident(self) -> Iterable[Tensor]:
        """Return its parameters, and its copy of the towers; see `Reference`."""
        towers = self._chunks.towers
        return [*(p for model in self._chunks.bare for p in model.parameters()), *(towers.copies() if towers else ())]


class AdapterReference:
    """The model in training with the adapter of version 0, or without any; implements `Reference`."""

    def __init__(self, adapter: MegatronAdapter, models: Sequence[Any]) -> None:
        self._adapter, self._models = adapter, models

    def take(self) -> None:
        """Keep the adapter of version 0 if it is not zero; see `Reference`."""
        self._adapter.keep_first()

    @contextmanager
    def models(self) -> Iterator[Sequence[Any]]:
        """Yield the model in training with the weights of version 0; see `Reference`."""
        with self._adapter.as_reference():
            yield self._models

    def shards(self) -> Mapping[str, LocalShard]:
        """Return what was trained in version 0; see `Reference`."""
        return self._adapter.first

    def resident(self) -> Iterable[Tensor]:
        """Return what was trained in version 0; see `Reference`."""
        return [shard.parameter for shard in self._adapter.first.values()]
