"""Check that transformers can build a model.

The usual names are known here. For others, and for unusual shapes, transformers is asked in a process of its own. The
engine, which builds the model, reports what remains.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from relax_actors.config import Config
from relax_actors.data import nested_config
from relax_actors.data.nested_config import text_fields
from relax_actors.engines.torch.describe_model import Description, describe
from relax_actors.errors import ConfigError
from relax_actors.media.family import family_of

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_DEFAULT_ROPE = "default"
_USUAL_TYPES = ("llama", "mistral", "qwen3")
USUAL_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
USUAL = Description(
    classes=USUAL_CLASSES,
    value_heads=tuple(USUAL_CLASSES),
    score_heads=tuple(USUAL_CLASSES),
    activations=("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"),
    ropes=("linear", "dynamic", "yarn", "longrope", "llama3"),
)
"""What needs no import of transformers: `relax check` of a usual model takes a fraction of a second."""


def check_architecture(config: Config, folder: Path) -> None:
    """Refuse a config.json that transformers cannot build a causal language model from.

    Raises:
        ConfigError: lists every problem, one a line.
    """
    given, body = _read(folder)
    where = f"{folder / 'config.json'}" if config.model.architecture is None else "model.architecture"
    fields = text_fields(given)
    if config.model.architecture is not None and not text_fields(config.model.architecture).get("head_dim"):
        fields["head_dim"] = None
    family = family_of(folder)
    # A multimodal model is of a type that `family_of` knows.
    names = [] if family else [str(given["model_type"]), str(given.get("text_config", {}).get("model_type"))]
    known = USUAL if _is_usual(fields, names) else describe(body)
    problems = [*_type_problems(names, known), *_field_problems(fields, known)]
    if family is not None:
        problems += nested_config.problems(given, family.spec)
    if not problems and known.error:
        problems = [f"transformers cannot build this model: {known.error}; correct the field that it names"]
    if problems:
        raise ConfigError(*(f"{where}: {problem}" for problem in problems))


def causal_model_class(folder: Path) -> str:
    """Return the name of the causal language model's class in transformers; empty if transformers has no such class."""
    given, body = _read(folder)
    model_type = str(given["model_type"])
    known = USUAL if model_type in USUAL.classes else describe(body)
    return known.classes.get(model_type, "")


def check_value_head(folder: Path) -> None:
    """Raise ConfigError for a config.json whose architecture has no token classifier to be a value head."""
    given, body = _read(folder)
    model_type = str(given["model_type"])
    if family_of(folder) is not None or model_type in USUAL.value_heads:
        return
    if model_type not in (known := describe(body).value_heads):
        why = _unknown("model_type", model_type, known, "a token-classification model", _USUAL_TYPES)
        msg = f"critic: {why}"
        raise ConfigError(msg)


def check_score_head(folder: Path, *, of_steps: bool) -> None:
    """Raise ConfigError for a config.json whose architecture cannot be a reward model, of steps or answers."""
    if family_of(folder) is not None:
        return  # see `score_model`
    given, body = _read(folder)
    model_type, kind = str(given["model_type"]), "token-classification" if of_steps else "sequence-classification"
    if model_type in USUAL.score_heads:
        return
    known = describe(body).value_heads if of_steps else describe(body).score_heads
    if model_type not in known:
        why = _unknown("model_type", model_type, known, f"a {kind} model", _USUAL_TYPES)
        msg = f"{folder / 'config.json'}: {why}; a reward model needs one"
        raise ConfigError(msg)


def check_layers(folder: Path, setting: str) -> None:
    """Refuse a model whose layers transformers does not name, for a setting that needs them; raises ConfigError."""
    given, body = _read(folder)
    model_type = str(given["model_type"])
    if family_of(folder) is None and model_type not in USUAL.classes and not describe(body).has_layers:
        msg = (
            f"{setting}: transformers names no layers of the model {model_type}, which are recomputed or shared one by "
            f"one; leave {setting} out, or choose another model"
        )
        raise ConfigError(msg)


def _read(folder: Path) -> tuple[dict[str, Any], str]:
    body = (folder / "config.json").read_text()
    return json.loads(body), body


def _is_usual(fields: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a config.json has only names that are known here, and a hidden size that its heads divide."""
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    activation = fields.get("hidden_act")
    return (
        (not names or any(name in USUAL.classes for name in names))
        and (activation is None or activation in USUAL.activations)
        and _rope(fields) in (_DEFAULT_ROPE, *USUAL.ropes)
        and not (heads and hidden and hidden % heads)
    )


def _type_problems(names: Collection[str], known: Description) -> Iterator[str]:
    if names and not any(name in known.classes for name in names):
        yield _unknown("model_type", next(iter(names)), known.classes, "a causal language model", _USUAL_TYPES)


def _field_problems(fields: Mapping[str, Any], known: Description) -> Iterator[str]:
    yield from _head_problems(fields, known)
    if (dtype := fields.get("dtype") or fields.get("torch_dtype")) and dtype not in DTYPES:
        yield f"dtype = {dtype!r} is no floating-point type of torch; use one of {', '.join(DTYPES)}"
    activation = fields.get("hidden_act")
    if activation is not None and activation not in known.activations:
        yield _unknown("hidden_act", str(activation), known.activations, "an activation", USUAL.activations)
    ropes = (_DEFAULT_ROPE, *known.ropes)
    if (kind := _rope(fields)) not in ropes:
        yield _unknown("rope_type", kind, ropes, "a scaling of rotary positions", ropes)


def _rope(fields: Mapping[str, Any]) -> str:
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    return str(rope.get("rope_type", rope.get("type", _DEFAULT_ROPE))) if isinstance(rope, dict) else _DEFAULT_ROPE


def _head_problems(fields: Mapping[str, Any], known: Description) -> Iterator[str]:
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    if not heads or not hidden:
        return
    if (groups := fields.get("num_key_value_heads")) and heads % groups:
        yield f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {groups}; change one of them"
    width = fields.get("head_dim")
    if hidden % heads and (not width or known.error):
        remedy = "" if known.error else ", or set head_dim"
        yield f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}; change one of them{remedy}"
    elif (width or hidden // heads) % 2 and known.has_rope and "partial_rotary" not in str(fields):
        yield f"head_dim = {width or hidden // heads} is odd; rotary positions need an even number"


def _unknown(field: str, value: str, known: Collection[str], kind: str, usual: Collection[str]) -> str:
    close = difflib.get_close_matches(value, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"use for example {', '.join(usual)}"
    return f"{field} = {value!r} is not {kind} of the installed transformers; {hint}"
