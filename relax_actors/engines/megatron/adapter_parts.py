"""Parts of megatron-core's linear layers that have adapters of their own, since transformers stores them as layers.

Queries, keys and values are one layer of megatron-core, gate and up projection a second. An adapter has A and B for
each layer of transformers, so that the numbers, the published names and PEFT's files are those of the torch engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relax_actors.data.adapter import DOWN, UP, AdapterModules
from relax_actors.engines.megatron.conversion import ADAPTER_DOWN, ADAPTER_UP, Conversion, adapter_key
from relax_actors.engines.megatron.families.layer_weights import Weight
from relax_actors.engines.torch.adapter import MARK_BYTES
from relax_actors.errors import ConfigError

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A linear layer of megatron-core with its parts, layers of transformers.

    Attributes:
        key: of its weight.
        weight: the tensors of the parts, in the order in which the layer holds them, and how it holds them.
        targets: names of the parts that have an adapter.
        groups: query groups that the outputs are interleaved by; 1 if they are not.
        experts: keys of the same layer of all experts, its own included, where it is that of an expert; else empty.
    """

    key: str
    weight: Weight
    targets: tuple[str, ...]
    groups: int
    experts: tuple[str, ...] = ()

    @property
    def parts(self) -> Iterator[tuple[str, int]]:
        """Names of the parts, with the number of their outputs."""
        for name, shape in zip(self.weight.names, self.weight.shapes, strict=True):
            yield name.removesuffix(_WEIGHT), shape[0]

    @property
    def inputs(self) -> int:
        """Number of inputs of all parts."""
        return self.weight.shapes[0][1]

    def joined(self, parts: Sequence[Tensor], shards: int = 1) -> Tensor:
        """Join outputs of the parts, `[..., out]` each, in the order of the layer; `shards` ranks share them."""
        if self.weight.form != "groups":
            return torch.cat(tuple(parts), -1)
        groups = self.groups // shards
        return torch.cat([part.reshape(*part.shape[:-1], groups, -1) for part in parts], -1).flatten(-2)


def layers_with_parts(conversion: Conversion, modules: AdapterModules) -> list[LayerParts]:
    """Return the linear layers of a whole model that have adapters; raises ConfigError for others."""
    left, layers = set(modules.targets), []
    for weight in conversion.weights:
        names = [name.removesuffix(_WEIGHT) for name in weight.names]
        if weight.form == "experts" and names[0] in left:
            left.discard(names[0])
            one = replace(weight, form="same", shapes=tuple(shape[1:] for shape in weight.shapes))
            layers += [LayerParts(key, one, (names[0],), 1, weight.keys) for key in weight.keys]
        if weight.form in ("same", "stacked", "groups") and weight.keys[0].endswith(_WEIGHT):
            targets = tuple(name for name in names if name in left)
            left -= set(targets)
            if targets:
                layers.append(LayerParts(weight.keys[0], weight, targets, conversion.architecture.query_groups))
    if left:
        msg = (
            f'lora.targets with trainer.backend = "megatron": {min(left)} is no linear layer of Megatron-Core, which '
            'computes it in another way; name the other layers in lora.targets, or set trainer.backend = "torch"'
        )
        raise ConfigError(msg)
    return layers


def adapter_weights(conversion: Conversion, layers: Sequence[LayerParts], modules: AdapterModules) -> list[Weight]:
    """Return what is published and saved of an adapter: A and B, modules that are trained as a whole, and the marks.

    Raises:
        ConfigError: a module that is trained as a whole is part of a parameter.
    """
    rank, weights = modules.form.rank, [Weight((mark,), (mark,), ((size,),)) for mark, size in MARK_BYTES.items()]
    for layer in layers:
        if layer.experts and layer.key != layer.experts[0]:
            continue  # the tensors are those of all experts
        for name, outputs in layer.parts:
            if name in layer.targets:
                weights.append(_matrix(layer, name, (ADAPTER_DOWN, DOWN), (rank, layer.inputs)))
                weights.append(_matrix(layer, name, (ADAPTER_UP, UP), (outputs, rank)))
    prefixes = tuple(f"{name}." for name in modules.saved)
    for weight in conversion.weights if prefixes else ():
        whole = [name for name in weight.names if name.startswith(prefixes)]
        if whole and len(whole) < len(weight.names):
            others = sorted(set(weight.names) - set(whole))
            msg = (
                f"lora.modules_to_save matches {whole}, which Megatron-Core stores in one parameter with {others}; "
                "match all of them or none of them"
            )
            raise ConfigError(msg)
        if whole:
            weights.append(weight)
    return weights


def _matrix(layer: LayerParts, name: str, ends: tuple[str, str], shape: tuple[int, ...]) -> Weight:
    """Return A or B of a part, with the ends of its key and name; of experts one tensor holds those of all."""
    if not layer.experts:
        return Weight((adapter_key(layer.key, name, ends[0]),), (name + ends[1],), (shape,))
    keys = tuple(adapter_key(key, name, ends[0]) for key in layer.experts)
    return Weight(keys, (name + ends[1],), ((len(keys), *shape),), "experts")
