"""Loads versions of an adapter into a server, which computes with them beside the weights of the base.

Invariant: the base has its verified weights before the first adapter, and each version is an adapter of its own, whose
name on the server is that of no other weights. Requests name their adapter, so a version in use never changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from relax_actors.data.adapter import DOWN, PREFIX, UP, AdapterForm
from relax_actors.data.model_folder import stored_shapes
from relax_actors.engines.sglang.adapter_form import peft_config, siblings
from relax_actors.engines.sglang.server import Server, pickled_by_name
from relax_actors.engines.sglang.weight_loaders import StagedWeights
from relax_actors.engines.torch.adapter import BASE, MARKS, SCALE, check_base, check_scale, digest_of
from relax_actors.errors import StoreError
from relax_actors.weights import files as weights


@dataclass(frozen=True, slots=True)
class _Payload:
    """An adapter as a server reads it: pickled tensors, and the SHA-256 of each by its name."""

    tensors: str
    checksums: Mapping[str, str]


class AdapterLoader:
    """Loads a base from its folder, and adapters in requests; see `WeightLoader`.

    Args:
        folder: model folder of the base, visible to the server by the same path.
        form: form of the adapters.
        ranks: of the server.

    Raises:
        StoreError: a file of the folder cannot be read.
    """

    is_adapter = True

    def __init__(self, folder: Path, form: AdapterForm, ranks: int = 1) -> None:
        self._folder, self._form, self._ranks = folder, form, ranks
        self._files, self._shapes = sorted(folder.glob("*.safetensors")), stored_shapes(folder)
        self._base = weights.fingerprint_of_files(self._files)
        self._payloads: dict[StagedWeights, _Payload] = {}

    @property
    def base(self) -> str:
        """Name of the weights of the base on a server."""
        return f"base:{self._base}"

    def stage(self, staged: StagedWeights, tensors: Mapping[str, Tensor]) -> None:
        """Pickle an adapter.

        Raises:
            ConfigError: it is an adapter of another base, or has another scale.
        """
        check_base(tensors.get(BASE), digest_of(self._base), f"version {staged.version}")
        check_scale(tensors.get(SCALE), self._form.scale, f"version {staged.version}")
        own = {name: tensor for name, tensor in tensors.items() if name not in MARKS}
        named = {PREFIX + name: tensor for name, tensor in (self._zeros(own) | own).items()}
        checksums = {name: _sha256(tensor) for name, tensor in named.items()}
        self._payloads[staged] = _Payload(pickled_by_name(named), checksums)

    def _zeros(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return an adapter of zeros for all layers that SGLang joins to those of an adapter."""
        found: dict[str, Tensor] = {}
        for layer in (name.removesuffix(DOWN) for name in own if name.endswith(DOWN)):
            for name in siblings(layer):
                (out, width), like = self._shapes[f"{name}.weight"], own[layer + DOWN]
                found[name + DOWN] = torch.zeros(self._form.rank, width, dtype=like.dtype)
                found[name + UP] = torch.zeros(out, self._form.rank, dtype=like.dtype)
        return found

    def serves(self, server: Server, staged: StagedWeights) -> bool:
        """Whether a server has the base and the adapter."""
        return server.identity() == self.base and staged.identity in server.adapters()

    def load(self, server: Server, staged: StagedWeights) -> None:
        """Load the base, unless the server has it, and then the adapter; the server compares the checksums."""
        if server.identity() != self.base:
            found = weights.fingerprint_of_files(self._files)
            if found != self._base:
                msg = f"{self._folder} holds weights with fingerprint {found}, not those of the base, {self._base}"
                raise StoreError(msg)
            server.load_files(self._folder, self.base)
        layers = {name.removesuffix(DOWN) for name in self._payloads[staged].checksums if name.endswith(DOWN)}
        payload = self._payloads[staged]
        config = peft_config(self._form, layers)
        server.load_adapter(staged.identity, config, [payload.tensors] * self._ranks, payload.checksums)

    def forget(self, staged: StagedWeights) -> None:
        """Release the pickled adapter."""
        self._payloads.pop(staged, None)

    def close(self) -> None:
        """Release all pickled adapters."""
        self._payloads.clear()


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
