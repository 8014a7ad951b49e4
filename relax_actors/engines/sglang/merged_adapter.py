"""Versions of an adapter as full sets, with the adapter added to the weights of the base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from relax_actors.data.adapter import DOWN, EXPERT, EXPERTS_DOWN, GATE_UP, UP, AdapterForm, weight_name
from relax_actors.engines.torch.adapter import BASE, SCALE, check_base, check_scale, digest_of
from relax_actors.engines.torch.lora_linear import merge
from relax_actors.weights import files as weights
from relax_actors.weights.encoder import published_dtype


class MergedAdapter:
    """Adds adapters to a base, which it keeps in host memory; raises StoreError if a file cannot be read.

    The tensors of the base have the names of transformers; `precision` is that of the base and of the full sets.
    """

    def __init__(self, folder: Path, form: AdapterForm, precision: torch.dtype) -> None:
        stored = weights.load(sorted(folder.glob("*.safetensors")))
        self._digest, self._form = digest_of(weights.fingerprint(stored)), form
        self._base = {n: t.to(published_dtype(n, precision)) if t.is_floating_point() else t for n, t in stored.items()}

    def full_set(self, version: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all weights of the model with an adapter; each sum is computed in float32 and rounded once.

        Raises:
            ConfigError: it is an adapter of another base, or has another scale.
        """
        check_base(tensors.get(BASE), self._digest, f"version {version}")
        check_scale(tensors.get(SCALE), self._form.scale, f"version {version}")
        whole = {name: t for name, t in tensors.items() if name in self._base}
        merged = self._base | whole
        for name in (name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)):
            down, up, own = tensors[name + DOWN], tensors[name + UP], weight_name(name)
            if own in self._base:
                merged[own] = merge(self._base[own], down, up, self._form.scale)
            else:  # the files hold the matrices of experts apart
                merged |= dict(self._merged_apart(name, down, up))
        return merged

    def _merged_apart(self, name: str, down: Tensor, up: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the matrices of a tensor of experts with their adapters; of gate and up projection B has one half."""
        layer = name.removesuffix(GATE_UP).removesuffix(EXPERTS_DOWN)
        parts = ("gate", "up") if name.endswith(GATE_UP) else ("down",)
        for n, (own_down, own_up) in enumerate(zip(down, up, strict=True)):
            for part, half in zip(parts, own_up.chunk(len(parts)), strict=True):
                matrix = f"{layer}{EXPERT}{n}.{part}_proj.weight"
                yield matrix, merge(self._base[matrix], own_down, half, self._form.scale)
