"""Exact conversion of weights between Hugging Face and megatron-core, for any layout.

A parameter's key is its name in the whole model: `layers.3.self_attention.linear_qkv.weight`,
`layers.3.mlp.experts.7.linear_fc1.weight`. To load, each rank builds the whole tensor of a key and keeps its shard. To
publish, rank 0 receives the shards of a key from their ranks and merges them. Neither direction needs the whole model
on one device. Hugging Face names are the names of transformers' modules; experts may be stored separately.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from relax_actors.engines.megatron.architecture import Architecture
from relax_actors.errors import ConfigError

EMBEDDING, FINAL_NORM, OUTPUT = "embedding.word_embeddings.weight", "final_layernorm.weight", "output_layer.weight"
QKV, FC1, FC2 = "self_attention.linear_qkv.weight", "linear_fc1.weight", "linear_fc2.weight"
QKV_BIAS = "self_attention.linear_qkv.bias"
TOWERS = "towers."
"""Prefix of the keys of the towers' weights, before their Hugging Face names."""
_IN_DECODER = {EMBEDDING: "embed_tokens.weight", FINAL_NORM: "norm.weight"}
_TOP_LEVEL = (*_IN_DECODER, OUTPUT)
VALUE_WEIGHT, VALUE_BIAS = "value_head.weight", "value_head.bias"
_RENAMED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(linear_fc[12]\.weight)")


def shard_axis(key: str) -> int | None:
    """Axis along which tensor parallelism splits a parameter; None if it is replicated."""
    if key.startswith(TOWERS):
        return None
    if key in (EMBEDDING, OUTPUT) or key.endswith((QKV, QKV_BIAS, FC1)):
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


@dataclass(frozen=True, slots=True)
class Conversion:
    """Conversion between the two forms of one model.

    Args:
        architecture: of the model.
        padded_vocab_size: rows of the embeddings in megatron-core; at least the vocabulary size.
        towers: shapes of the weights of the towers of a multimodal model, by Hugging Face name.
        value_head: Hugging Face names of the value head that a critic has in place of the output layer, by key.
    """

    architecture: Architecture
    padded_vocab_size: int
    towers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    value_head: Mapping[str, str] = field(default_factory=dict)

    def entries(self) -> Iterator[tuple[str, ...]]:
        """All keys in a fixed order, grouped by the Hugging Face tensor that they form together."""
        model = self.architecture
        yield from ((TOWERS + name,) for name in self.towers)
        yield (EMBEDDING,)
        for layer in range(model.layers):
            prefix = f"layers.{layer}."
            yield (prefix + "input_layernorm.weight",)
            yield (prefix + QKV,)
            if model.qkv_bias:
                yield (prefix + QKV_BIAS,)
            if model.qk_layernorm:
                yield (prefix + "self_attention.q_layernorm.weight",)
                yield (prefix + "self_attention.k_layernorm.weight",)
            yield (prefix + "self_attention.linear_proj.weight",)
            yield (prefix + "pre_mlp_layernorm.weight",)
            if model.experts:
                yield (prefix + "mlp.router.weight",)
                for name in (FC1, FC2):
                    yield tuple(f"{prefix}mlp.experts.{expert}.{name}" for expert in range(model.experts))
            else:
                yield (prefix + "mlp." + FC1,)
                yield (prefix + "mlp." + FC2,)
        yield (FINAL_NORM,)
        if self.value_head:
            yield from ((key,) for key in self.value_head)
        elif not model.tied_embeddings:
            yield (OUTPUT,)

    def names(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Names of the Hugging Face tensors of an entry of `entries`."""
        key = keys[0]
        if key in _TOP_LEVEL or key in self.value_head:
            return (self._top_level_name(key),)
        if key.startswith(TOWERS):
            return (key.removeprefix(TOWERS),)
        layer, local = _split_key(key)
        prefix = f"{self.architecture.prefix}layers.{layer}."
        if local in (QKV, QKV_BIAS):
            return tuple(f"{prefix}self_attn.{name}_proj.{local.rpartition('.')[2]}" for name in "qkv")
        if local == "mlp." + FC1:
            return tuple(f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up"))
        if match := _EXPERT.fullmatch(local):
            return (f"{prefix}mlp.experts.{'gate_up' if match[2] == FC1 else 'down'}_proj",)
        return (prefix + _RENAMED[local],)

    def _top_level_name(self, key: str) -> str:
        if key in self.value_head:
            return self.value_head[key]
        if key == OUTPUT and not self.architecture.tied_embeddings:
            return "lm_head.weight"
        return self.architecture.prefix + _IN_DECODER[EMBEDDING if key == OUTPUT else key]

    def from_hugging_face(self, key: str, source: Mapping[str, Tensor]) -> Tensor:
        """Whole tensor of a key.

        Raises:
            ConfigError: `source` lacks a tensor, or a tensor has an unexpected shape.
        """
        model = self.architecture
        if key in _TOP_LEVEL or key in self.value_head:
            return self._top_level(key, source)
        read = partial(_checked, source)
        if key.startswith(TOWERS):
            name = key.removeprefix(TOWERS)
            return read(name, self.towers[name])
        layer, local = _split_key(key)
        prefix, hidden, width = f"{model.prefix}layers.{layer}.", model.hidden_size, model.head_dim
        if local in (QKV, QKV_BIAS):
            # A weight has a column for each hidden unit, a bias has none.
            columns = (hidden,) if local == QKV else ()
            rows = {"q": model.heads * width, "k": model.query_groups * width, "v": model.query_groups * width}
            parts = [read(name, (rows[part], *columns)) for part, name in zip("qkv", self.names((key,)), strict=True)]
            # megatron-core interleaves [queries, key, value] by query group.
            groups = [tensor.reshape(model.query_groups, -1, width, *columns) for tensor in parts]
            return torch.cat(groups, 1).reshape(-1, *columns)
        if local == "mlp." + FC1:
            shape = (model.ffn_size, hidden)
            return torch.cat([read(f"{prefix}mlp.{name}_proj.weight", shape) for name in ("gate", "up")])
        if match := _EXPERT.fullmatch(local):
            return self._expert(source, f"{prefix}mlp.experts.", int(match[1]), match[2])
        return read(prefix + _RENAMED[local], self._shape(local))

    def _top_level(self, key: str, source: Mapping[str, Tensor]) -> Tensor:
        vocabulary, hidden = self.architecture.vocab_size, self.architecture.hidden_size
        shapes = {FINAL_NORM: (hidden,), VALUE_WEIGHT: (1, hidden), VALUE_BIAS: (1,)}
        whole = _checked(source, self._top_level_name(key), shapes.get(key, (vocabulary, hidden)))
        return whole if key in shapes else _padded(whole, self.padded_vocab_size)

    def _shape(self, local: str) -> tuple[int, ...]:
        model = self.architecture
        if local.endswith("linear_proj.weight"):
            return model.hidden_size, model.heads * model.head_dim
        if local.endswith(FC2):
            return model.hidden_size, model.ffn_size
        if local.endswith("router.weight"):
            return model.experts, model.hidden_size
        return (model.head_dim if local.startswith("self_attention") else model.hidden_size,)

    def _expert(self, source: Mapping[str, Tensor], prefix: str, expert: int, local: str) -> Tensor:
        model = self.architecture
        up, down = (model.expert_ffn_size, model.hidden_size), (model.hidden_size, model.expert_ffn_size)
        # transformers 5 fuses the experts of a layer; files on the hub and transformers 4 store each one separately.
        if prefix + "gate_up_proj" in source:
            if local == FC1:
                shape = (model.experts, 2 * model.expert_ffn_size, model.hidden_size)
                return _checked(source, prefix + "gate_up_proj", shape)[expert]
            return _checked(source, prefix + "down_proj", (model.experts, *down))[expert]
        if local == FC1:
            return torch.cat([_checked(source, f"{prefix}{expert}.{name}_proj.weight", up) for name in ("gate", "up")])
        return _checked(source, f"{prefix}{expert}.down_proj.weight", down)

    def to_hugging_face(self, keys: tuple[str, ...], wholes: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face tensors of an entry of `entries`, with their names."""
        yield from zip(self.names(keys), self._split(keys, wholes), strict=True)

    def _split(self, keys: tuple[str, ...], wholes: list[Tensor]) -> Iterator[Tensor]:
        model, key, whole = self.architecture, keys[0], wholes[0]
        local = key if key in (*_TOP_LEVEL, *self.value_head) or key.startswith(TOWERS) else _split_key(key)[1]
        if local.startswith(TOWERS):
            yield whole
        elif local in (EMBEDDING, OUTPUT):
            yield whole[: model.vocab_size]
        elif local in (QKV, QKV_BIAS):
            queries, columns = model.heads // model.query_groups, whole.shape[1:]
            groups = whole.reshape(model.query_groups, queries + 2, model.head_dim, *columns)
            for tensor in torch.split(groups, [queries, 1, 1], 1):
                yield tensor.reshape(-1, *columns)
        elif local == "mlp." + FC1:
            yield from whole.chunk(2)
        elif _EXPERT.fullmatch(local):
            yield torch.stack(wholes)
        else:
            yield whole


def _split_key(key: str) -> tuple[int, str]:
    """Layer number and name within the layer."""
    match = _LAYER.fullmatch(key)
    if match is None:
        msg = f"megatron-core parameter {key} has no Hugging Face name; the model family is not supported"
        raise LookupError(msg)
    return int(match[1]), match[2]


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
