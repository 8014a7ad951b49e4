"""The model's folder: written for an architecture, or the user's; without torch."""

from __future__ import annotations

import difflib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_actors.config import Config
from relax_actors.data import nested_config
from relax_actors.data.character_tokenizer import make_character_tokenizer
from relax_actors.errors import ConfigError
from relax_actors.media.families import FAMILIES
from relax_actors.media.family import family_of, spec_of_body
from relax_actors.media.processor_writer import write_processor_files


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
        tables: number of parameters of embeddings and output head.
    """

    parameters: int
    context_length: int
    vocabulary: int
    model_type: str
    moe: MoeFacts | None = None
    cached: int = 0
    tables: int = 0


def prepare(config: Config, folder: Path) -> None:
    """Write the folder of `model.architecture`; nothing for `model.path`.

    Raises:
        ConfigError: the tokenizer's settings contradict each other or the architecture.
    """
    architecture, tokenizer = config.model.architecture, config.model.tokenizer
    if architecture is None or tokenizer is None:
        return
    spec = spec_of_body(architecture, "model.architecture", FAMILIES)
    fields = nested_config.text_fields(architecture)
    _check_sizes(fields, "model.architecture")
    folder.mkdir(parents=True, exist_ok=True)
    ids = make_character_tokenizer(tokenizer.alphabet, tokenizer.end, folder, {} if spec is None else spec.tokens)
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template)
    wanted = fields.get("vocab_size", ids["vocab_size"])
    if wanted < ids["vocab_size"]:
        msg = f"model.architecture.vocab_size is {wanted}, the tokenizer has {ids['vocab_size']} ids; leave it out"
        raise ConfigError(msg)
    # Written out because the defaults of engines differ.
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    own = {"num_key_value_heads": heads} if heads else {}
    if heads and hidden and hidden % heads == 0 and "qk_rope_head_dim" not in fields:
        own["head_dim"] = hidden // heads
    of_text = ids | {"bos_token_id": None} | own
    body = of_text | architecture
    if spec is not None:
        body = nested_config.complete(architecture, spec, of_text, ids["vocab_size"] - len(spec.tokens))
    (folder / "config.json").write_text(json.dumps(body, indent=1, sort_keys=True))
    if (family := family_of(folder)) is not None and config.media is not None:
        write_processor_files(folder, family, config.media)


def measure(folder: Path, where: str = "", setting: str = "model.path") -> ModelFacts:
    """Read the facts of a model folder; `where` and `setting` are names for errors.

    Raises:
        ConfigError: it is not a model folder, its config.json lacks a field that every decoder has, or a file of its
            weights is missing or damaged.
    """
    path = folder / "config.json"
    where = where or f"{path}"
    try:
        body: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(body, dict):
            msg = "it is not an object"
            raise TypeError(msg)  # noqa: TRY301 reported below with the other errors
        towers = nested_config.tower_parameters(body)
        body = nested_config.text_fields(body)
        _check_sizes(body, where)
        facts = ModelFacts(
            parameters=_stored_parameters(folder) or _decoder_parameters(body) + towers,
            context_length=int(body["max_position_embeddings"]),
            vocabulary=int(body["vocab_size"]),
            model_type=str(body["model_type"]),
            moe=experts_of(body),
            cached=_cached(body),
            tables=_table_parameters(body),
        )
    except FileNotFoundError as error:
        msg = f"{setting} {folder} is not a model folder: it has no config.json"
        raise ConfigError(msg) from error
    except KeyError as error:
        name = str(error.args[0])
        close = difflib.get_close_matches(name, [key for key in body if key not in KNOWN_FIELDS], 1, 0.8)
        hint = f"rename {close[0]!r}" if close else "add it"
        msg = f"{where} is not the config of a language model: it has no {name!r}; {hint}"
        raise ConfigError(msg) from None
    except (OSError, ValueError, TypeError) as error:
        msg = f"{where} is not the config of a language model: {type(error).__name__} {error}"
        raise ConfigError(msg) from error
    return facts


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
KNOWN_FIELDS = (*SIZES, "model_type", "tie_word_embeddings")


def _check_sizes(fields: dict[str, Any], where: str) -> None:
    """Check that sizes of a model are positive integers; raises ConfigError."""
    wrong = {
        name: value
        for name in SIZES
        if (value := fields.get(name)) is not None and (type(value) is not int or value < 1)
    }
    if wrong:
        lines = [f"{where}: {name} = {value!r} must be a whole number above 0" for name, value in wrong.items()]
        raise ConfigError(*lines)


def expert_count(fields: Mapping[str, Any]) -> int:
    """Return a layer's number of experts by config.json; 0 without experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return int(next((fields[name] for name in names if fields.get(name)), 0))


def experts_of(fields: Mapping[str, Any]) -> MoeFacts | None:
    """Return the experts that a config.json names; None if it names none."""
    experts, of_token = expert_count(fields), int(fields.get("num_experts_per_tok") or 0)
    if not experts or not of_token:
        return None
    every, dense = int(fields.get("decoder_sparse_step") or 1), fields.get("mlp_only_layers") or []
    first, layers = int(fields.get("first_k_dense_replace") or 0), range(int(fields["num_hidden_layers"]))
    kinds = fields.get("mlp_layer_types") or ["sparse"] * len(layers)
    without = tuple(
        layer for layer in layers if (layer + 1) % every or layer in dense or layer < first or kinds[layer] == "dense"
    )
    return MoeFacts(len(layers) - len(without), experts, of_token, without)


def _cached(body: dict[str, Any]) -> int:
    heads = int(body.get("num_attention_heads") or 0)
    if not heads:
        return 0
    width = int(body.get("head_dim") or int(body["hidden_size"]) // heads)
    return 2 * int(body["num_hidden_layers"]) * int(body.get("num_key_value_heads") or heads) * width


def _stored_parameters(folder: Path) -> int:
    """Number of elements of all tensors in the folder's shards; errors as `stored_shapes`."""
    return sum(math.prod(shape) for shape in stored_shapes(folder).values())


def stored_shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes of all tensors in a folder's shards by name, from their headers.

    Raises:
        ConfigError: a shard that the index names is missing, or is no safetensors file.
    """
    _check_index(folder / "model.safetensors.index.json")
    shapes: dict[str, list[int]] = {}
    for shard in folder.glob("*.safetensors"):
        try:
            with shard.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > shard.stat().st_size:
                    msg = f"a header of {length} bytes"
                    raise ValueError(msg)  # noqa: TRY301 reported like any other malformed header
                header = json.loads(file.read(length))
            shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
        except (struct.error, ValueError, KeyError, AttributeError, TypeError, OverflowError, MemoryError) as error:
            msg = f"{shard} is no safetensors file ({type(error).__name__}); download it again"
            raise ConfigError(msg) from error
    return shapes


def _check_index(index: Path) -> None:
    """Check that all shards that an index names are there."""
    if not index.exists():
        return
    try:
        named = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        msg = f"{index} is no index of weights ({type(error).__name__}); download it again"
        raise ConfigError(msg) from error
    if missing := sorted(name for name in named if not (index.parent / name).is_file()):
        msg = f"model.path {index.parent} lacks {', '.join(missing)}, which {index.name} names; download it again"
        raise ConfigError(msg)


def _decoder_parameters(body: dict[str, Any]) -> int:
    """Number of parameters of a Llama-like decoder with gated MLP, by its config."""
    hidden, layers = body["hidden_size"], body["num_hidden_layers"]
    heads = body["num_attention_heads"]
    width = body.get("head_dim") or hidden // heads
    kv = body.get("num_key_value_heads") or heads
    attention = hidden * width * (heads + 2 * kv) + heads * width * hidden
    experts = expert_count(body)
    if body["model_type"].startswith("qwen3"):
        attention += 2 * width  # norms of queries and keys
    if body["model_type"].startswith("qwen2"):
        attention += width * (heads + 2 * kv)  # biases of queries, keys and values
    mlp = 3 * hidden * body["intermediate_size"]
    if experts:
        mlp = experts * 3 * hidden * (body.get("moe_intermediate_size") or body["intermediate_size"]) + hidden * experts
    return int(layers * (attention + mlp + 2 * hidden) + _table_parameters(body) + hidden)


def _table_parameters(body: dict[str, Any]) -> int:
    """Number of parameters of embeddings and output head, which may be the same."""
    return int(body["vocab_size"] * body["hidden_size"] * (1 if body.get("tie_word_embeddings") else 2))
