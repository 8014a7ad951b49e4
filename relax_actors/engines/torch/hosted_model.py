"""Torch models whose weights come by version: prepared beside those in use, verified, and swapped in between uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from relax_actors.engines.torch.model import build, check_fit
from relax_actors.errors import StoreError
from relax_actors.weights.host_copy import HostCopy
from relax_actors.weights.protocols import WeightUpdate


class Served(ABC):
    """Some parameters; what they hold comes by `load`, or by `stage` and `swap`.

    Args:
        follows: whether further versions are to come: memory for the next one is kept.
    """

    def __init__(self, *, follows: bool) -> None:
        self._version: int | None = None
        self._staged: tuple[int, dict[str, Tensor]] | None = None
        self._follows = follows
        self._spare: dict[str, Tensor] = {}

    @abstractmethod
    def _parameters(self) -> Mapping[str, Tensor]:
        """The parameters, by names of its own."""

    @abstractmethod
    def _fitted(self, version: int, tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        """Weights in Hugging Face names as the parameters of these names have them.

        Raises:
            ConfigError: they are not those of the model.
        """

    @property
    def version(self) -> int | None:
        """Version of the weights that are loaded."""
        return self._version

    def empty_copy(self) -> HostCopy:
        """A copy of tensors; see `WeightConsumer`."""
        return HostCopy()

    def stage(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Prepare weights beside those in use; see `WeightConsumer`."""
        known, fitted = self._parameters(), self._fitted(version, tensors)
        spare, self._spare = self._spare, {}
        staged = {}
        for name, tensor in fitted:
            staged[name] = spare[name] if name in spare else torch.empty_like(known[name].data)
            staged[name].copy_(tensor)
        self._staged = version, staged

    def swap(self) -> int:
        """Serve what was staged; see `WeightConsumer`."""
        staged, self._staged = self._staged, None
        if staged is None:
            msg = "no weights are staged; nothing can be swapped"
            raise StoreError(msg)
        version, tensors = staged
        known = self._parameters()
        # What was in use takes the next version: giving its memory back would take longer than all else here.
        self._spare = {name: known[name].data for name in tensors} if self._follows else {}
        for name, tensor in tensors.items():
            known[name].data = tensor
        self._version = version
        return version

    def load(self, version: int, fingerprint: str, shards: Sequence[Path]) -> None:
        """Swap to a whole set of weights at once; see `WeightConsumer`."""
        self._version = None
        copy = HostCopy()
        copy.apply([WeightUpdate(version, fingerprint, shards)])
        self.stage(version, copy.tensors)
        self.swap()

    def require_weights(self) -> int:
        """The version in use.

        Raises:
            StoreError: there is none.
        """
        if self._version is None:
            msg = "no verified weights are loaded; nothing can be computed"
            raise StoreError(msg)
        return self._version

    def close(self) -> None:
        """Let go of what is kept for further weights; the rest ends with the process."""
        self._staged, self._spare = None, {}


class ServedModel(Served):
    """A model folder's architecture in transformers.

    Args:
        path: model folder.
        device: torch device.
        dtype: of the weights here.
        follows: whether further versions are to come: memory for the next one is kept.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        follows: bool = True,
    ) -> None:
        super().__init__(follows=follows)
        self._device = torch.device(device)
        self._model = build(path, dtype=dtype, device=self._device)
        self._model.train(mode=False)

    @property
    def model(self) -> PreTrainedModel:
        """The model that computes, with the weights in use."""
        return self._model

    def _parameters(self) -> Mapping[str, Tensor]:
        known: dict[str, Tensor] = self._model.state_dict(keep_vars=True)
        return known

    def _fitted(self, version: int, tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        check_fit(self._model, tensors, f"version {version}")
        return tensors.items()
