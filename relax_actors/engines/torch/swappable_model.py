"""Torch models that switch between weight versions: a new version is staged beside the current one, then swapped in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from relax_actors.engines.torch.host_memory import MovableTensors
from relax_actors.engines.torch.model import build, copy_into, read_folder
from relax_actors.engines.torch.trained_weights import AllWeights, TrainedWeights
from relax_actors.errors import StoreError
from relax_actors.weights.host_copy import HostCopy
from relax_actors.weights.node_sets import NodeSets
from relax_actors.weights.protocols import WeightUpdate


class SwappableWeights(ABC):
    """Parameters whose values are replaced version by version; implements `WeightConsumer`.

    Args:
        device: torch device of the weights.
        follows: whether further versions will be loaded; memory for the next one is then kept allocated.
    """

    def __init__(self, device: torch.device | str, *, follows: bool) -> None:
        self._version: int | None = None
        self._staged: tuple[int, dict[str, Tensor]] | None = None
        self._follows = follows
        self._sets: NodeSets | None = None
        self._spare: dict[str, Tensor] = {}
        self._device = torch.device(device)
        # One thread stages weights, and another moves them.
        self._memory = MovableTensors(self._on_device, self._device)

    @abstractmethod
    def _parameters(self) -> Mapping[str, Tensor]:
        """Return the parameters by the implementation's own names."""

    @abstractmethod
    def _fitted(self, version: int, tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        """Convert weights with Hugging Face names to the names and shapes of `_parameters`.

        Raises:
            ConfigError: they do not match the model.
        """

    @property
    def version(self) -> int | None:
        """Version in use; None before the first."""
        return self._version

    def share_copies(self, sets: NodeSets) -> None:
        """Share host copies with other actors of the node; see `SharesCopies`."""
        self._sets = sets

    def empty_copy(self) -> HostCopy:
        """Return an empty host copy; see `WeightConsumer`."""
        return HostCopy(self._sets)

    def stage(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights to the device beside those in use; see `WeightConsumer`."""
        known, fitted = self._parameters(), self._fitted(version, tensors)
        with self._memory:
            spare, self._spare = self._spare, {}
            staged = {}
            for name, tensor in fitted:
                staged[name] = spare[name] if name in spare else torch.empty_like(known[name].data)
                staged[name].copy_(tensor)
            self._staged = version, staged

    def swap(self) -> int:
        """Switch to the staged weights; see `WeightConsumer`."""
        staged, self._staged = self._staged, None
        if staged is None:
            msg = "no weights are staged; nothing can be swapped"
            raise StoreError(msg)
        version, tensors = staged
        known = self._parameters()
        # The previous weights become the memory of the next version: freeing it would dominate the time of a swap.
        self._spare = {name: known[name].data for name in tensors} if self._follows else {}
        for name, tensor in tensors.items():
            known[name].data = tensor.to(known[name].device)
        self._version = version
        return version

    def load(self, version: int, fingerprint: str, shards: Sequence[Path]) -> None:
        """Verify, stage and swap to a full set of weights; see `WeightConsumer`."""
        self._version = None
        copy = HostCopy()
        copy.apply([WeightUpdate(version, fingerprint, shards)])
        self.stage(version, copy.tensors)
        self.swap()

    def release_memory(self, folder: Path | None) -> int:
        """Move the weights in use and the staged ones off the device; see `ReleasesMemory`."""
        with self._memory:
            self._spare = {}
            return self._memory.release(folder)

    def resume_memory(self) -> int:
        """Move them back; see `ReleasesMemory`."""
        return self._memory.resume()

    def _on_device(self) -> list[Tensor]:
        staged = self._staged
        return [*self._resident(), *(() if staged is None else staged[1].values())]

    def _resident(self) -> Iterable[Tensor]:
        """Return the weights in use, also those that no version replaces."""
        return self._parameters().values()

    def require_weights(self) -> int:
        """Return the version in use.

        Raises:
            StoreError: no weights are loaded.
        """
        if self._version is None:
            msg = "no verified weights are loaded; load a version before computing"
            raise StoreError(msg)
        return self._version

    def close(self) -> None:
        """Release the memory of staged and spare weights; the process frees the rest when it exits."""
        self._staged, self._spare = None, {}
        if self._sets is not None:
            self._sets.close()


class SwappableModel(SwappableWeights):
    """Model of a model folder in transformers, with swappable weights.

    Args:
        path: model folder.
        device: torch device.
        dtype: dtype of the weights on the device.
        follows: whether further versions will be loaded; memory for the next one is then kept allocated.
        make: builds the model from `dtype` and `device`; that of the folder for tokens by default.
        weights: returns which weights of a model the versions replace; all by default.

    Raises:
        ConfigError: transformers cannot build the model.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        follows: bool = True,
        make: Callable[..., PreTrainedModel] | None = None,
        weights: Callable[[PreTrainedModel], TrainedWeights] = AllWeights,
    ) -> None:
        super().__init__(device, follows=follows)
        self._model = (make or partial(build, path))(dtype=dtype, device=self._device)
        self._model.train(mode=False)
        self._weights = weights(self._model)
        # Swapping replaces the data of parameters, never the parameters.
        self._known = self._weights.parameters()

    @property
    def model(self) -> PreTrainedModel:
        """Model with the weights in use."""
        return self._model

    def freeze(self, path: Path) -> None:
        """Take the weights of a model folder, which never change, as version 0.

        Raises:
            ConfigError: the folder has no weights that fit the model.
            StoreError: a file cannot be read.
        """
        copy_into(self._model, read_folder(self._model, path), str(path))
        self._version = 0

    def _parameters(self) -> Mapping[str, Tensor]:
        return self._known

    def _resident(self) -> Iterable[Tensor]:
        return self._model.state_dict(keep_vars=True).values()

    def _fitted(self, version: int, tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        return self._weights.fitted(tensors, f"version {version}")
