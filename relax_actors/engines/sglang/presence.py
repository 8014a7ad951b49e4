"""Check whether SGLang is installed and which models it serves, without importing it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from relax_actors.errors import MissingPackageError

TEXT_WITH_EXPERTS = ("qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe", "gpt_oss")
"""Types of text models with experts whose weights `to_checkpoint_names` can name."""
RENAMED = {
    "mixtral": (
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    )
}
"""Parts of the names of weights in transformers, each with that in SGLang, by model type."""

DIVIDES = ("qwen2", "qwen2_moe", "mixtral")
"""Types of models whose heads have `hidden_size / num_attention_heads` dimensions in SGLang, whatever `head_dim` is."""
NO_WINDOWS = {"mistral": 4096, "mixtral": None, "qwen2": None, "qwen2_moe": None, "qwen3": None, "qwen3_moe": None}
"""Types of models whose sliding windows SGLang ignores, each with the window of a config.json without the field."""
ALL_SPARSE = ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe")
"""Types of models all of whose layers have experts in SGLang, whatever a config.json says."""


def require() -> None:
    """Raise MissingPackageError, with the command that installs it, if SGLang is not installed."""
    missing = [name for name in ("sglang", "sgl_kernel") if find_spec(name) is None]
    if missing:
        msg = f'rollout.backend = "sglang" needs {", ".join(missing)}, which is not installed; run `make sglang`'
        raise MissingPackageError(msg)


def computes_on_cpu() -> bool:
    """Whether the installed kernels are the substitute for those of GPUs."""
    return find_spec("relax_sglang_cpu") is not None


def computes_float8() -> bool:
    """Whether the installed kernels compute with FP8 weights; an older substitute for those of GPUs does not."""
    return not computes_on_cpu() or find_spec("relax_sglang_cpu.float8") is not None


def difference(fields: Mapping[str, Any]) -> str:
    """Return why SGLang would compute another model than a config.json describes; empty if it would not."""
    return _ignored_head_dim(fields) or _ignored_window(fields) or _ignored_head(fields) or _dense_layers(fields)


def _ignored_window(fields: Mapping[str, Any]) -> str:
    kind = str(fields.get("model_type"))
    if kind not in NO_WINDOWS or not fields.get("use_sliding_window", not kind.startswith("qwen")):
        return ""
    window, length = fields.get("sliding_window", NO_WINDOWS[kind]), fields.get("max_position_embeddings")
    if window is None or length is None or window >= length:
        return ""
    return (
        f"config.json of the model has sliding_window = {window}, which SGLang ignores for {kind}; if no sequence is "
        f"longer, set max_position_embeddings = {length} to {window}"
    )


def _ignored_head(fields: Mapping[str, Any]) -> str:
    if fields.get("model_type") != "gemma3_text" or fields.get("tie_word_embeddings", True):
        return ""
    return (
        "config.json of the model has tie_word_embeddings = false, and SGLang computes logits of gemma3_text with the "
        "embeddings"
    )


def _dense_layers(fields: Mapping[str, Any]) -> str:
    if fields.get("model_type") not in ALL_SPARSE:
        return ""
    every, dense = fields.get("decoder_sparse_step") or 1, fields.get("mlp_only_layers") or []
    if every == 1 and not dense:
        return ""
    what = f"mlp_only_layers = {dense}" if dense else f"decoder_sparse_step = {every}"
    return f"config.json of the model has {what}, and SGLang gives all layers of {fields['model_type']} experts"


def _ignored_head_dim(fields: Mapping[str, Any]) -> str:
    given, width, heads = (fields.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if fields.get("model_type") not in DIVIDES or given is None or not width or not heads or given == width // heads:
        return ""
    return (
        f"config.json of the model has head_dim = {given}, and SGLang gives heads of {fields['model_type']} "
        f"hidden_size / num_attention_heads = {width // heads} dimensions; choose a model without head_dim"
    )


def has_experts(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json names experts, under whatever name its architecture has for them."""
    return any("expert" in name and type(value) is int and value > 1 for name, value in fields.items())


def serves(class_name: str, package: Path | None = None) -> bool:
    """Whether SGLang, in its folder `package` or as installed, has a model class."""
    if package is None:
        spec = find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            return False
        package = Path(spec.submodule_search_locations[0])
    definition = re.compile(rf"^class {re.escape(class_name)}\b", re.MULTILINE)
    return any(definition.search(file.read_text()) for file in (package / "srt" / "models").glob("*.py"))
