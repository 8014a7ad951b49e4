"""Check that transformers can build a model, from its source files: importing it takes seconds.

The engine, which builds the model, reports problems that these files do not show.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from relax_actors.config import Config
from relax_actors.data import nested_config
from relax_actors.data.nested_config import text_fields
from relax_actors.errors import ConfigError
from relax_actors.media.family import family_of

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_DEFAULT_ROPE = "default"
_WHOLE_HEADS = "is not a multiple of the number of attention"
"""Text of the error of a model's configuration whose heads do not divide its hidden size."""


def check_architecture(config: Config, folder: Path) -> None:
    """Refuse a config.json that transformers cannot build a causal language model from.

    Args:
        config: configuration of the run.
        folder: model folder, with its config.json.

    Raises:
        ConfigError: lists every problem, one a line.
    """
    given: dict[str, Any] = json.loads((folder / "config.json").read_text())
    where = f"{folder / 'config.json'}" if config.model.architecture is None else "model.architecture"
    fields = text_fields(given)
    if config.model.architecture is not None and not text_fields(config.model.architecture).get("head_dim"):
        fields["head_dim"] = None
    model_type = str(given["model_type"])
    if (family := family_of(folder)) is not None:
        found = [*_field_problems(fields, model_type), *nested_config.problems(given, family.spec)]
    else:
        found = [*_type_problems(model_type, given.get("text_config", {}).get("model_type"))]
        found = found or [*_field_problems(fields, model_type)]
    if found:
        raise ConfigError("\n".join(f"{where}: {problem}" for problem in found))


def causal_model_class(model_type: str) -> str:
    """Return the class of transformers that generates with models of a type; empty if there is none."""
    return _table("models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES").get(model_type, "")


def check_value_head(folder: Path) -> None:
    """Refuse a config.json whose architecture cannot be built with a value head.

    Raises:
        ConfigError: it has no token-classification model of this type.
    """
    model_type = str(json.loads((folder / "config.json").read_text())["model_type"])
    if family_of(folder) is not None:
        return
    known = _names("models/auto/modeling_auto.py", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES")
    if known and model_type not in known:
        usual = ("llama", "mistral", "qwen3")
        why = _unknown("model_type", model_type, known, "a token-classification model", usual)
        msg = f"critic: {why}"
        raise ConfigError(msg)


def _type_problems(model_type: str, of_text: str | None) -> Iterator[str]:
    known = _names("models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    if known and model_type not in known and of_text not in known:
        yield _unknown("model_type", model_type, known, "a causal language model", ("llama", "mistral", "qwen3"))


def _field_problems(fields: Mapping[str, Any], model_type: str) -> Iterator[str]:
    yield from _head_problems(fields, model_type)
    if (dtype := fields.get("dtype") or fields.get("torch_dtype")) and dtype not in DTYPES:
        yield f"dtype = {dtype!r} is no floating-point type of torch; use one of {', '.join(DTYPES)}"
    activations = _names("activations.py", "ACT2CLS")
    activation = fields.get("hidden_act")
    if activations and activation is not None and activation not in activations:
        yield _unknown("hidden_act", str(activation), activations, "an activation", ("silu", "gelu", "relu"))
    ropes = _names("modeling_rope_utils.py", "ROPE_INIT_FUNCTIONS")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", _DEFAULT_ROPE)) if isinstance(rope, dict) else _DEFAULT_ROPE
    if ropes and kind not in (_DEFAULT_ROPE, *ropes):
        yield _unknown("rope_type", str(kind), ropes, "a scaling of rotary positions", (_DEFAULT_ROPE, *ropes))


def _head_problems(fields: Mapping[str, Any], model_type: str) -> Iterator[str]:
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    if not heads or not hidden:
        return
    if (groups := fields.get("num_key_value_heads")) and heads % groups:
        yield f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {groups}; change one of them"
    width, strict = fields.get("head_dim"), _has(model_type, _WHOLE_HEADS)
    if hidden % heads and (not width or strict):
        remedy = "" if strict else ", or set head_dim"
        yield f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}; change one of them{remedy}"
    elif (width or hidden // heads) % 2 and _has(model_type, "rope_parameters") and "partial_rotary" not in str(fields):
        yield f"head_dim = {width or hidden // heads} is odd; rotary positions need an even number"


def _has(model_type: str, text: str) -> bool:
    """Whether the source of a model's configuration contains a text."""
    name = model_type.replace("-", "_")
    return text in _source(f"models/{name}/configuration_{name}.py")


def _unknown(field: str, value: str, known: tuple[str, ...], kind: str, usual: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(value, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"use for example {', '.join(usual)}"
    return f"{field} = {value!r} is not {kind} of the installed transformers; {hint}"


def _names(file: str, variable: str) -> tuple[str, ...]:
    """Keys of a table in a source file of transformers; empty if the table is not found."""
    return tuple(_table(file, variable))


@cache
def _table(file: str, variable: str) -> dict[str, str]:
    """Table in a source file of transformers, with the text of values that are strings; empty if it is not found."""
    table = re.search(rf"^{variable}\b[^\n]*[({{]\n(.*?)^[)}}]", _source(file), re.MULTILINE | re.DOTALL)
    pairs = re.findall(r'^\s+\(?"([^"]+)"[,:] (?:"([^"]*)")?', table[1], re.MULTILINE) if table else []
    return dict(pairs)


@cache
def _source(file: str) -> str:
    """Text of a source file of transformers; empty if there is none."""
    spec = find_spec("transformers")
    try:
        return (Path(str(spec.origin)).parent / file).read_text() if spec is not None else ""
    except OSError:
        return ""
