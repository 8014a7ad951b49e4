"""The model's folder: written for an architecture, or inspected if it is the user's; without torch."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_actors.config import Config
from relax_actors.data.tokenizer import make_character_tokenizer
from relax_actors.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MoeFacts:
    """Experts of a model.

    Attributes:
        layers: number of layers with experts.
        experts: experts of each of these layers.
        experts_of_token: experts that a token is routed to.
        without: indices of the layers without experts.
    """

    layers: int
    experts: int
    experts_of_token: int
    without: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model that are known without building it.

    Attributes:
        parameters: number of parameters.
        context_length: largest number of tokens of prompt and completion together.
        vocabulary: number of token ids.
        model_type: name of the architecture in transformers.
        moe: experts, if there are any.
        cached: numbers in the key-value cache for a token; 0 if unknown.
    """

    parameters: int
    context_length: int
    vocabulary: int
    model_type: str
    moe: MoeFacts | None = None
    cached: int = 0


def prepare(config: Config, folder: Path) -> None:
    """Write config.json and the tokenizer of `model.architecture` to `folder`; does nothing for `model.path`.

    Raises:
        ConfigError: the tokenizer's settings contradict each other or the architecture.
    """
    architecture, tokenizer = config.model.architecture, config.model.tokenizer
    if architecture is None or tokenizer is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    ids = make_character_tokenizer(tokenizer.alphabet, tokenizer.end, folder)
    wanted = architecture.get("vocab_size", ids["vocab_size"])
    if wanted < ids["vocab_size"]:
        msg = f"model.architecture.vocab_size is {wanted}, the tokenizer has {ids['vocab_size']} ids; leave it out"
        raise ConfigError(msg)
    heads = architecture.get("num_attention_heads", 0)
    # Written out because the defaults of engines differ.
    own = {"num_key_value_heads": heads, "head_dim": architecture.get("hidden_size", 0) // max(1, heads)}
    body = ids | {"bos_token_id": None} | (own if heads else {}) | architecture
    (folder / "config.json").write_text(json.dumps(body, indent=1, sort_keys=True))


def measure(folder: Path) -> ModelFacts:
    """Read the facts of a model folder.

    Raises:
        ConfigError: it is not a model folder, or its config.json lacks a field that every decoder has.
    """
    path = folder / "config.json"
    try:
        body: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(body, dict):
            msg = "it is not an object"
            raise TypeError(msg)  # noqa: TRY301 reported below with the other errors
        body = body | body.get("text_config", {})
        facts = ModelFacts(
            parameters=_stored_parameters(folder) or _decoder_parameters(body),
            context_length=int(body["max_position_embeddings"]),
            vocabulary=int(body["vocab_size"]),
            model_type=str(body["model_type"]),
            moe=_moe(body),
            cached=_cached(body),
        )
    except FileNotFoundError as error:
        msg = f"model.path {folder} is not a model folder: it has no config.json"
        raise ConfigError(msg) from error
    except (KeyError, ValueError, TypeError) as error:
        msg = f"{path} is not the config of a language model: {type(error).__name__} {error}"
        raise ConfigError(msg) from error
    return facts


def _moe(body: dict[str, Any]) -> MoeFacts | None:
    experts = int(body.get("num_experts") or body.get("num_local_experts") or 0)
    of_token = int(body.get("num_experts_per_tok") or 0)
    if not experts or not of_token:
        return None
    every, dense = int(body.get("decoder_sparse_step") or 1), body.get("mlp_only_layers") or []
    layers = range(int(body["num_hidden_layers"]))
    without = tuple(layer for layer in layers if (layer + 1) % every or layer in dense)
    return MoeFacts(len(layers) - len(without), experts, of_token, without)


def _cached(body: dict[str, Any]) -> int:
    heads = int(body.get("num_attention_heads") or 0)
    if not heads:
        return 0
    width = int(body.get("head_dim") or int(body["hidden_size"]) // heads)
    return 2 * int(body["num_hidden_layers"]) * int(body.get("num_key_value_heads") or heads) * width


def _stored_parameters(folder: Path) -> int:
    """Number of elements of all tensors in the folder's shards, from their headers."""
    total = 0
    for shard in folder.glob("*.safetensors"):
        with shard.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                count = 1
                for size in entry["shape"]:
                    count *= size
                total += count
    return total


def _decoder_parameters(body: dict[str, Any]) -> int:
    """Number of parameters of a decoder of the Llama family (Qwen, Mistral, SmolLM) with gated MLP, from its config."""
    hidden, layers, vocabulary = body["hidden_size"], body["num_hidden_layers"], body["vocab_size"]
    heads = body["num_attention_heads"]
    width = body.get("head_dim") or hidden // heads
    kv = body.get("num_key_value_heads") or heads
    attention = hidden * width * (heads + 2 * kv) + heads * width * hidden
    experts = body.get("num_experts") or body.get("num_local_experts") or 0
    if body["model_type"].startswith("qwen3"):
        attention += 2 * width  # norms of queries and keys
    if body["model_type"].startswith("qwen2"):
        attention += width * (heads + 2 * kv)  # biases of queries, keys and values
    mlp = 3 * hidden * body["intermediate_size"]
    if experts:
        mlp = experts * 3 * hidden * (body.get("moe_intermediate_size") or body["intermediate_size"]) + hidden * experts
    embeddings = vocabulary * hidden * (1 if body.get("tie_word_embeddings") else 2)
    return int(layers * (attention + mlp + 2 * hidden) + embeddings + hidden)
