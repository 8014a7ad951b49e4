"""Reference of the KL that a trainer computes itself: the weights of version 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from relax_actors.engines.torch.adapter import Adapter
from relax_actors.engines.torch.model import copy_into, tensors_of


class Reference(Protocol):
    """Weights of version 0 beside those in training."""

    def take(self) -> None:
        """Make the current weights those of version 0."""

    def model(self) -> AbstractContextManager[PreTrainedModel]:
        """Return a context with the model that has the weights of version 0."""

    def tensors(self) -> Mapping[str, Tensor] | None:
        """Return the weights that a checkpoint holds; None for none."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the weights of a checkpoint."""

    def resident(self) -> Iterable[Tensor]:
        """Return the tensors on the device besides those of the model in training."""


class ReferenceModel:
    """A second model, which `build` builds with any weights; implements `Reference`."""

    def __init__(self, trained: PreTrainedModel, build: Callable[[], PreTrainedModel]) -> None:
        self._trained, self._model = trained, build().requires_grad_(False)

    @torch.no_grad()
    def take(self) -> None:
        """Copy the weights; see `Reference`."""
        trained = self._trained.state_dict(keep_vars=True)
        for name, weight in self._model.state_dict(keep_vars=True).items():
            weight.copy_(trained[name])

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """Yield the second model; see `Reference`."""
        yield self._model

    def tensors(self) -> Mapping[str, Tensor] | None:
        """Return all weights; see `Reference`."""
        return tensors_of(self._model)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights into the second model; see `Reference`."""
        copy_into(self._model, tensors, "reference")

    def resident(self) -> Iterable[Tensor]:
        """Return its parameters; see `Reference`."""
        return self._model.parameters()


class AdapterReference:
    """The model in training with the adapter of version 0, or without any; implements `Reference`.

    Args:
        adapter: of the model.
        lock: held while weights that ranks share have other numbers; threads that publish hold it, too.
    """

    def __init__(self, adapter: Adapter, lock: AbstractContextManager[Any]) -> None:
        self._adapter, self._lock = adapter, lock

    def take(self) -> None:
        """Keep the adapter of version 0 if it is not zero; see `Reference`."""
        self._adapter.keep_first()

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """Yield the model in training with the weights of version 0; see `Reference`."""
        with self._lock if self._adapter.changes_for_reference else nullcontext(), self._adapter.as_reference():
            yield self._adapter.model

    def tensors(self) -> Mapping[str, Tensor] | None:
        """Return the adapter of version 0; see `Reference`."""
        return self._adapter.first

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the adapter of version 0; see `Reference`."""
        self._adapter.set_first(tensors)

    def resident(self) -> Iterable[Tensor]:
        """Return copies of modules that are trained as a whole; see `Reference`."""
        first = self._adapter.first
        return () if first is None else first.values()
