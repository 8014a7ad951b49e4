"""Loads versions of an adapter into a server, which computes with them beside the weights of the base.

Invariant: the base has its verified weights before the first adapter, and each version is an adapter of its own, whose
name on the server is that of no other weights. Requests name their adapter, so a version in use never changes.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from relax_actors.data.adapter import DOWN, PREFIX, UP, AdapterForm
from relax_actors.data.model_folder import stored_shapes
from relax_actors.engines.sglang.adapter_form import peft_config, siblings
from relax_actors.engines.sglang.server import Server
from relax_actors.engines.sglang.weight_loaders import StagedWeights, pickled_by_name
from relax_actors.engines.torch.adapter import BASE, MARKS, SCALE, check_base, check_scale, digest_of
from relax_actors.errors import StoreError
from relax_actors.weights import files as weights
from relax_actors.weights.node_sets import NodeSet, NodeSets


@dataclass(frozen=True, slots=True)
class _Payload:
    """An adapter as a server reads it: pickled tensors, and the SHA-256 of each by its name."""

    tensors: str
    checksums: Mapping[str, str]


class AdapterLoader:
    """Loads a base from its folder, and adapters in requests; see `WeightLoader`.

    Args:
        folder: model folder of the base, visible by the same path to a server that the run started.
        form: form of the adapters.
        shared: used by this loader alone, visible to other servers. They read the base there: in their own file system
            the path of the model folder may hold other weights.
        ranks: of the server.

    Raises:
        StoreError: a file of the folder cannot be read.
    """

    is_adapter = True
    sets: NodeSets | None = None

    def __init__(self, folder: Path, form: AdapterForm, shared: Path, ranks: int = 1) -> None:
        self._folder, self._form, self._shared, self._ranks = folder, form, shared, ranks
        self._files, self._shapes = sorted(folder.glob("*.safetensors")), stored_shapes(folder)
        self._base = weights.fingerprint_of_files(self._files)
        self._payloads: dict[StagedWeights, _Payload] = {}

    @property
    def base(self) -> str:
        """Name of the weights of the base on a server."""
        return f"base:{self._base}"

    def stage(self, staged: StagedWeights, tensors: Mapping[str, Tensor], held: NodeSet | None = None) -> None:
        """Pickle an adapter; raises ConfigError if it is of another base, or has another scale."""
        del held
        check_base(tensors.get(BASE), digest_of(self._base), f"version {staged.version}")
        check_scale(tensors.get(SCALE), self._form.scale, f"version {staged.version}")
        own = {name: tensor for name, tensor in tensors.items() if name not in MARKS}
        named = {PREFIX + name: tensor for name, tensor in (self._zeros(own) | own).items()}
        checksums = {name: _sha256(tensor) for name, tensor in named.items()}
        self._payloads[staged] = _Payload(pickled_by_name(named), checksums)

    def _zeros(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return an adapter of zeros for all layers that SGLang joins to those of an adapter."""
        zeros: dict[str, Tensor] = {}
        for layer in (name.removesuffix(DOWN) for name in own if name.endswith(DOWN)):
            for name in siblings(layer):
                (out, width), like = self._shapes[f"{name}.weight"], own[layer + DOWN]
                zeros[name + DOWN] = torch.zeros(self._form.rank, width, dtype=like.dtype)
                zeros[name + UP] = torch.zeros(out, self._form.rank, dtype=like.dtype)
        return zeros

    def serves(self, server: Server, staged: StagedWeights) -> bool:
        """Whether a server has the base and the adapter."""
        return server.identity() == self.base and staged.identity in server.adapters()

    def load(self, server: Server, staged: StagedWeights) -> None:
        """Load the base, unless the server has it, and then the adapter; the server compares the checksums."""
        if server.identity() != self.base:
            digest = weights.fingerprint_of_files(self._files)
            if digest != self._base:
                msg = f"{self._folder} holds weights with fingerprint {digest}, not those of the base, {self._base}"
                raise StoreError(msg)
            with nullcontext(self._folder) if server.record.is_own else self._copied() as folder:
                server.load_files(folder, self.base)
        layers = {name.removesuffix(DOWN) for name in self._payloads[staged].checksums if name.endswith(DOWN)}
        payload = self._payloads[staged]
        config = peft_config(self._form, layers)
        server.load_adapter(staged.identity, config, [payload.tensors] * self._ranks, payload.checksums)

    @contextmanager
    def _copied(self) -> Iterator[Path]:
        """Give a folder with hard links to the files of the base, or on another file system with copies."""
        shutil.rmtree(self._shared, ignore_errors=True)
        try:
            self._shared.mkdir(parents=True)
            for file in self._folder.glob("*.safetensors*"):
                _link_or_copy(file.resolve(), self._shared / file.name)
        except OSError as error:
            msg = f"the base cannot be copied to {self._shared} for a server that the run did not start: {error}"
            raise StoreError(msg) from error
        else:
            yield self._shared
        finally:
            shutil.rmtree(self._shared, ignore_errors=True)

    def forget(self, staged: StagedWeights) -> None:
        """Release the pickled adapter."""
        self._payloads.pop(staged, None)

    def close(self) -> None:
        """Release all pickled adapters."""
        self._payloads.clear()


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
