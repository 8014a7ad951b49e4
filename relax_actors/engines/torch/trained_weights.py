"""Weights of a model that training changes: all of them, or those of an adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from relax_actors.engines.torch.model import check_fit, copy_into, tensors_of


class TrainedWeights(Protocol):
    """Weights of a model that are trained, published and saved."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what is published, by name; tied weights once."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the parameters and buffers that `fitted` has names of."""

    def fitted(self, tensors: Mapping[str, Tensor], source: str) -> Iterable[tuple[str, Tensor]]:
        """Return published tensors by the names of `parameters`.

        Args:
            tensors: as `tensors` returns them.
            source: origin of the tensors, for errors.

        Raises:
            ConfigError: they do not fit the model.
        """

    def copy(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Copy published tensors into the model; see `fitted`."""

    def dropping(self, update: int, part: int) -> AbstractContextManager[None]:
        """Return the context of a pass that trains, in which inputs may be dropped.

        Args:
            update: number of optimizer updates before.
            part: number of the micro-batch in the update.
        """


class AllWeights:
    """All weights of a model; implements `TrainedWeights`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._shapes: dict[str, object] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return all weights by Hugging Face name; see `TrainedWeights`."""
        return tensors_of(self._model)

    def parameters(self) -> Mapping[str, Tensor]:
        """Return all parameters and buffers, tied ones under each of their names."""
        return self._model.state_dict(keep_vars=True)

    def fitted(self, tensors: Mapping[str, Tensor], source: str) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors, whose names are those of the model; see `TrainedWeights`."""
        shapes: dict[str, object] = {name: tensor.shape for name, tensor in tensors.items()}
        if shapes != self._shapes:
            check_fit(self._model, tensors, source)
            self._shapes = shapes
        return tensors.items()

    def copy(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Copy a full set of weights into the model; see `TrainedWeights`."""
        copy_into(self._model, tensors, source)

    def dropping(self, update: int, part: int) -> AbstractContextManager[None]:
        """Drop nothing."""
        del update, part
        return nullcontext()
