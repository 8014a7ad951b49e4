"""Exact conversion of weights between Hugging Face and megatron-core, for any layout.

A parameter's key is its name in the whole model: `layers.3.self_attention.linear_qkv.weight`,
`layers.3.mlp.experts.7.linear_fc1.weight`. To load, each rank builds the whole tensor of a key and keeps its shard. To
publish, rank 0 receives the shards of a key from their ranks and merges them. Neither direction needs the whole model
on one device. Hugging Face names are the names of transformers' modules; experts may be stored separately. The file of
a family says which parameters and tensors a layer has (`families`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relax_actors.engines.megatron.families import Architecture
from relax_actors.engines.megatron.families.layer_weights import (
    FC1,
    FC2,
    LATENT,
    QKV,
    QKV_BIAS,
    Weight,
    layer_weights,
)
from relax_actors.errors import ConfigError

EMBEDDING, FINAL_NORM, OUTPUT = "embedding.word_embeddings.weight", "final_layernorm.weight", "output_layer.weight"
TOWERS = "towers."
"""Prefix of the keys of the towers' weights, before their Hugging Face names."""
ADAPTER, ADAPTER_DOWN, ADAPTER_UP = ".adapter.", ".down", ".up"
"""Parts of the keys of adapters: `<layer>.adapter.<part>.down` is A of a part of a linear layer, `.up` is B."""
VALUE_WEIGHT, VALUE_BIAS = "value_head.weight", "value_head.bias"


@dataclass(frozen=True, slots=True)
class NumberHead:
    """Linear head that computes numbers of a token in place of logits: values of a critic, scores of a reward model.

    Attributes:
        names: Hugging Face names of its weights, by key.
        precision: of its computation.
        outputs: numbers of a token.
    """

    names: Mapping[str, str]
    precision: str
    outputs: int = 1

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of its weights, by Hugging Face name."""
        of_key = {VALUE_WEIGHT: (self.outputs, hidden_size), VALUE_BIAS: (self.outputs,)}
        return {name: of_key[key] for key, name in self.names.items()}

    @property
    def modules(self) -> tuple[str, ...]:
        """Hugging Face names of the modules that have its weights."""
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in self.names.values()))


def adapter_key(key: str, name: str, end: str) -> str:
    """Key of A (`ADAPTER_DOWN`) or B (`ADAPTER_UP`) of a part, with its Hugging Face name, of a linear layer."""
    return key.removesuffix(".weight") + ADAPTER + name.rpartition(".")[2] + end


def shard_axis(key: str) -> int | None:
    """Axis along which tensor parallelism splits a parameter; None if it is replicated."""
    if key.startswith(TOWERS):
        return None
    if ADAPTER in key:  # A has the inputs of the layer, B its outputs
        axis = shard_axis(key.partition(ADAPTER)[0] + ".weight")
        return axis if axis is not None and key.endswith((ADAPTER_UP, ADAPTER_DOWN)[axis]) else None
    if key in (EMBEDDING, OUTPUT) or key.endswith((QKV, QKV_BIAS, FC1, *LATENT)):
        return 0
    return 1 if key.endswith(("linear_proj.weight", FC2)) else None


def shard_of(key: str, whole: Tensor, shards: int, shard: int) -> Tensor:
    """Shard number `shard` of `shards` of a whole parameter."""
    axis = shard_axis(key)
    if axis is None:
        return whole
    if key.endswith(FC1):  # every rank stacks its rows of gate above its rows of up
        return torch.cat([half.chunk(shards)[shard] for half in whole.chunk(2)])
    return whole.chunk(shards, axis)[shard]


def merge_shards(key: str, shards: list[Tensor]) -> Tensor:
    """Whole parameter from the shards of all ranks; the inverse of `shard_of`."""
    axis = shard_axis(key)
    if axis is None or len(shards) == 1:
        return shards[0]
    if key.endswith(FC1):
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([*(gate for gate, _ in halves), *(up for _, up in halves)])
    return torch.cat(shards, axis)


class Conversion:
    """Conversion between the two forms of one model.

    Args:
        architecture: of the model.
        padded_vocab_size: rows of the embeddings in megatron-core; at least the vocabulary size.
        towers: shapes of the weights of the towers of a multimodal model, by Hugging Face name.
        head: in place of the output layer; None for the output layer.
        weights: weights to convert; None for all of the model.
    """

    def __init__(
        self,
        architecture: Architecture,
        padded_vocab_size: int,
        towers: Mapping[str, tuple[int, ...]] | None = None,
        head: NumberHead | None = None,
        weights: Sequence[Weight] | None = None,
    ) -> None:
        self.architecture, self._rows = architecture, padded_vocab_size
        self.head = head
        self._weights = list(_weights(architecture, towers or {}, head) if weights is None else weights)
        self._places = {key: (weight, i) for weight in self._weights for i, key in enumerate(weight.keys)}
        if architecture.tied_embeddings and EMBEDDING in self._places and head is None:  # the last stage has a copy
            self._places[OUTPUT] = self._places[EMBEDDING]

    @property
    def weights(self) -> Sequence[Weight]:
        """All weights of the model, in a fixed order."""
        return self._weights

    def of(self, weights: Sequence[Weight]) -> Conversion:
        """Return the conversion of other weights of the same model, such as those of its adapter."""
        return Conversion(self.architecture, self._rows, head=self.head, weights=weights)

    def entries(self) -> Iterator[tuple[str, ...]]:
        """All keys in a fixed order, grouped by the Hugging Face tensor that they form together."""
        return (weight.keys for weight in self._weights)

    def names(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Names of the Hugging Face tensors of an entry of `entries`."""
        return self._place(keys[0])[0].names

    def _place(self, key: str) -> tuple[Weight, int]:
        """Weight that a key belongs to, and its number among the keys of the weight."""
        if key not in self._places:
            msg = f"megatron-core parameter {key} has no Hugging Face name; the model family is not supported"
            raise LookupError(msg)
        return self._places[key]

    def from_hugging_face(self, key: str, source: Mapping[str, Tensor]) -> Tensor:
        """Whole tensor of a key; raises ConfigError if `source` lacks it, or it has another shape."""
        weight, number = self._place(key)
        if weight.form == "experts":
            return _expert(weight, number, source)
        tensors = [_checked(source, name, shape) for name, shape in zip(weight.names, weight.shapes, strict=True)]
        if weight.form == "stacked":
            return torch.cat(tensors)
        if weight.form == "padded":
            return _padded(tensors[0], self._rows)
        if weight.form == "groups":
            # megatron-core interleaves [queries, key, value] by query group.
            model, columns = self.architecture, tensors[0].shape[1:]
            groups = [tensor.reshape(model.query_groups, -1, model.head_dim, *columns) for tensor in tensors]
            return torch.cat(groups, 1).reshape(-1, *columns)
        return tensors[0]

    def to_hugging_face(self, keys: tuple[str, ...], wholes: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face tensors of an entry of `entries`, with their names."""
        weight = self._place(keys[0])[0]
        yield from zip(weight.names, self._split(weight, wholes), strict=True)

    def _split(self, weight: Weight, wholes: Sequence[Tensor]) -> Iterator[Tensor]:
        whole = wholes[0]
        if weight.form == "experts":
            yield torch.stack(tuple(wholes))
        elif weight.form == "stacked":
            yield from whole.chunk(2)
        elif weight.form == "padded":
            yield whole[: weight.shapes[0][0]]
        elif weight.form == "groups":
            model, columns = self.architecture, whole.shape[1:]
            queries = model.heads // model.query_groups
            groups = whole.reshape(model.query_groups, queries + 2, model.head_dim, *columns)
            for tensor in torch.split(groups, [queries, 1, 1], 1):
                yield tensor.reshape(-1, *columns)
        else:
            yield whole


def _weights(model: Architecture, towers: Mapping[str, tuple[int, ...]], head: NumberHead | None) -> Iterator[Weight]:
    """All weights of a model, with keys and names in the whole model."""
    table = ((model.vocab_size, model.hidden_size),)
    yield from (Weight((TOWERS + name,), (name,), (shape,)) for name, shape in towers.items())
    yield Weight((EMBEDDING,), (f"{model.prefix}embed_tokens.weight",), table, "padded")
    for layer in range(model.layers):
        for weight in layer_weights(model, layer):
            key, name = f"layers.{layer}.", f"{model.prefix}layers.{layer}."
            keys, names = tuple(key + local for local in weight.keys), tuple(name + local for local in weight.names)
            yield replace(weight, keys=keys, names=names, parts=tuple(name + part for part in weight.parts))
    yield Weight((FINAL_NORM,), (f"{model.prefix}norm.weight",), ((model.hidden_size,),))
    if head is not None:
        shapes = head.shapes(model.hidden_size)
        yield from (Weight((key,), (name,), (shapes[name],)) for key, name in head.names.items())
    elif not model.tied_embeddings:
        yield Weight((OUTPUT,), ("lm_head.weight",), table, "padded")


def _expert(weight: Weight, expert: int, source: Mapping[str, Tensor]) -> Tensor:
    """Parameter of an expert."""
    (name,), (shape,) = weight.names, weight.shapes
    # transformers 5 fuses the experts of a layer; files on the hub and transformers 4 store each one separately.
    if name in source:
        return _checked(source, name, shape)[expert]
    rows = shape[1] // len(weight.parts), *shape[2:]
    return torch.cat([_checked(source, part.format(expert), rows) for part in weight.parts])


def _checked(source: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in source:
        msg = f"the model's weights have no tensor {name}; the first names are {sorted(source)[:5]}"
        raise ConfigError(msg)
    tensor = source[name]
    if tuple(tensor.shape) != shape:
        msg = f"the model's weights: {name} has shape {list(tensor.shape)}, config.json implies {list(shape)}"
        raise ConfigError(msg)
    return tensor


def _padded(whole: Tensor, rows: int) -> Tensor:
    return torch.cat([whole, whole.new_zeros(rows - len(whole), whole.shape[1])]) if rows > len(whole) else whole
