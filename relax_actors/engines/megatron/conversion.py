"""Weights from Hugging Face to megatron-core and back, exactly, at any parallel layout.

A parameter has a key, which is its name in the whole model: `layers.3.self_attention.linear_qkv.weight`,
`layers.3.mlp.experts.7.linear_fc1.weight`. From Hugging Face each rank makes the whole tensor of a key and takes its
piece; the other way rank 0 receives the pieces of a key from the ranks that have them, and joins them. So neither
needs the whole model on any device. Names are those of transformers' modules; experts may come one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from relax_actors.engines.megatron.architecture import Architecture
from relax_actors.errors import ConfigError

EMBEDDING, FINAL_NORM, OUTPUT = "embedding.word_embeddings.weight", "final_layernorm.weight", "output_layer.weight"
QKV, FC1, FC2 = "self_attention.linear_qkv.weight", "linear_fc1.weight", "linear_fc2.weight"
_TOP = {EMBEDDING: "model.embed_tokens.weight", FINAL_NORM: "model.norm.weight", OUTPUT: "lm_head.weight"}
_SAME = {
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


def axis_of(key: str) -> int | None:
    """Along which axis the tensor ranks share a parameter; None if each has the whole."""
    if key in (EMBEDDING, OUTPUT) or key.endswith((QKV, FC1)):
        return 0
    return 1 if key.endswith(("linear_proj.weight", FC2)) else None


def piece_of(key: str, whole: Tensor, pieces: int, piece: int) -> Tensor:
    """What one of so many ranks has of a parameter."""
    axis = axis_of(key)
    if axis is None:
        return whole
    if key.endswith(FC1):  # gate and up lie one above the other in every rank
        return torch.cat([half.chunk(pieces)[piece] for half in whole.chunk(2)])
    return whole.chunk(pieces, axis)[piece]


def joined(key: str, pieces: list[Tensor]) -> Tensor:
    """The parameter of all ranks' pieces; undoes `piece_of`."""
    axis = axis_of(key)
    if axis is None or len(pieces) == 1:
        return pieces[0]
    if key.endswith(FC1):
        halves = [piece.chunk(2) for piece in pieces]
        return torch.cat([*(gate for gate, _ in halves), *(up for _, up in halves)])
    return torch.cat(pieces, axis)


class Stored(Mapping[str, Tensor]):
    """The tensors of safetensors shards, each read when it is asked for."""

    def __init__(self, shards: list[Path]) -> None:
        self._files = [safetensors.safe_open(shard, framework="pt") for shard in shards]
        self._where = {name: file for file in self._files for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Between the two forms of one model.

    Args:
        architecture: of the model.
        rows: of the embeddings in megatron-core, which may be more than the vocabulary.
    """

    architecture: Architecture
    rows: int

    def entries(self) -> Iterator[tuple[str, ...]]:
        """The keys of the model in an order of their own; those that make up one Hugging Face tensor together."""
        model = self.architecture
        yield (EMBEDDING,)
        for layer in range(model.layers):
            one = f"layers.{layer}."
            yield (one + "input_layernorm.weight",)
            yield (one + QKV,)
            if model.norms_of_heads:
                yield (one + "self_attention.q_layernorm.weight",)
                yield (one + "self_attention.k_layernorm.weight",)
            yield (one + "self_attention.linear_proj.weight",)
            yield (one + "pre_mlp_layernorm.weight",)
            if model.experts:
                yield (one + "mlp.router.weight",)
                for part in (FC1, FC2):
                    yield tuple(f"{one}mlp.experts.{expert}.{part}" for expert in range(model.experts))
            else:
                yield (one + "mlp." + FC1,)
                yield (one + "mlp." + FC2,)
        yield (FINAL_NORM,)
        if not model.tied:
            yield (OUTPUT,)

    def names(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the Hugging Face tensors of one of the `entries`."""
        key = keys[0]
        if key in _TOP:
            return (_TOP[EMBEDDING] if self.architecture.tied and key == OUTPUT else _TOP[key],)
        layer, part = _parsed(key)
        one = f"model.layers.{layer}."
        if part == QKV:
            return tuple(f"{one}self_attn.{name}_proj.weight" for name in "qkv")
        if part == "mlp." + FC1:
            return tuple(f"{one}mlp.{name}_proj.weight" for name in ("gate", "up"))
        if match := _EXPERT.fullmatch(part):
            return (f"{one}mlp.experts.{'gate_up' if match[2] == FC1 else 'down'}_proj",)
        return (one + _SAME[part],)

    def from_hugging_face(self, key: str, source: Mapping[str, Tensor]) -> Tensor:
        """The whole tensor of a key.

        Raises:
            ConfigError: the source lacks a tensor, or has it in another shape.
        """
        model = self.architecture
        if key in _TOP:
            name = _TOP[EMBEDDING] if model.tied and key == OUTPUT else _TOP[key]
            shape = (model.hidden,) if key == FINAL_NORM else (model.vocabulary, model.hidden)
            whole = _taken(source, name, shape)
            return whole if key == FINAL_NORM else _padded(whole, self.rows)
        layer, part = _parsed(key)
        take = partial(_taken, source)
        one, hidden, width = f"model.layers.{layer}.", model.hidden, model.head_width
        if part == QKV:
            query = take(f"{one}self_attn.q_proj.weight", (model.heads * width, hidden))
            shape = (model.groups * width, hidden)
            rest = [take(f"{one}self_attn.{name}_proj.weight", shape) for name in "kv"]
            groups = [tensor.reshape(model.groups, -1, width, hidden) for tensor in (query, *rest)]
            return torch.cat(groups, 1).reshape(-1, hidden)
        if part == "mlp." + FC1:
            shape = (model.mlp_width, hidden)
            return torch.cat([take(f"{one}mlp.{name}_proj.weight", shape) for name in ("gate", "up")])
        if match := _EXPERT.fullmatch(part):
            return self._expert(source, f"{one}mlp.experts.", int(match[1]), match[2])
        return take(one + _SAME[part], self._shape(part))

    def _shape(self, part: str) -> tuple[int, ...]:
        model = self.architecture
        if part.endswith("linear_proj.weight"):
            return model.hidden, model.heads * model.head_width
        if part.endswith(FC2):
            return model.hidden, model.mlp_width
        if part.endswith("router.weight"):
            return model.experts, model.hidden
        return (model.head_width if part.startswith("self_attention") else model.hidden,)

    def _expert(self, source: Mapping[str, Tensor], one: str, expert: int, part: str) -> Tensor:
        model = self.architecture
        wide, narrow = (model.expert_width, model.hidden), (model.hidden, model.expert_width)
        if one + "gate_up_proj" in source:  # transformers 5; one by one on disk and in transformers 4
            if part == FC1:
                shape = (model.experts, 2 * model.expert_width, model.hidden)
                return _taken(source, one + "gate_up_proj", shape)[expert]
            return _taken(source, one + "down_proj", (model.experts, *narrow))[expert]
        if part == FC1:
            return torch.cat([_taken(source, f"{one}{expert}.{name}_proj.weight", wide) for name in ("gate", "up")])
        return _taken(source, f"{one}{expert}.down_proj.weight", narrow)

    def to_hugging_face(self, keys: tuple[str, ...], wholes: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The Hugging Face tensors of one of the `entries`, by name."""
        yield from zip(self.names(keys), self._apart(keys, wholes), strict=True)

    def _apart(self, keys: tuple[str, ...], wholes: list[Tensor]) -> Iterator[Tensor]:
        model, key, whole = self.architecture, keys[0], wholes[0]
        part = key if key in _TOP else _parsed(key)[1]
        if part in (EMBEDDING, OUTPUT):
            yield whole[: model.vocabulary]
        elif part == QKV:
            queries = model.heads // model.groups
            groups = whole.reshape(model.groups, queries + 2, model.head_width, model.hidden)
            for tensor in torch.split(groups, [queries, 1, 1], 1):
                yield tensor.reshape(-1, model.hidden)
        elif part == "mlp." + FC1:
            yield from whole.chunk(2)
        elif _EXPERT.fullmatch(part):
            yield torch.stack(wholes)
        else:
            yield whole


def _parsed(key: str) -> tuple[int, str]:
    match = _LAYER.fullmatch(key)
    if match is None:
        msg = f"parameter {key} of megatron-core has no name in Hugging Face"
        raise LookupError(msg)
    return int(match[1]), match[2]


def _taken(source: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in source:
        msg = f"the model's weights have no tensor {name}; there are {sorted(source)[:5]} ..."
        raise ConfigError(msg)
    tensor = source[name]
    if tuple(tensor.shape) != shape:
        msg = f"the model's weights: {name} is {list(tensor.shape)}, by config.json it is {list(shape)}"
        raise ConfigError(msg)
    return tensor


def _padded(whole: Tensor, rows: int) -> Tensor:
    return torch.cat([whole, whole.new_zeros(rows - len(whole), whole.shape[1])]) if rows > len(whole) else whole
