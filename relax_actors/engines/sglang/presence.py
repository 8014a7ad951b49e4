"""Check whether SGLang is installed and which models it serves, without importing it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from relax_actors.errors import MissingPackageError

TEXT_WITH_EXPERTS = ("qwen2_moe", "qwen3_moe")
"""Types of text models with experts whose weights `checkpoint_names` can name."""

DIVIDES = ("qwen2", "qwen2_moe")
"""Types of models whose heads have `hidden_size / num_attention_heads` dimensions in SGLang, whatever `head_dim` is."""


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


def ignored_head_dim(fields: Mapping[str, Any]) -> str:
    """Return why SGLang computes other heads than a config.json describes; empty if it does not."""
    given, width, heads = (fields.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if fields.get("model_type") not in DIVIDES or given is None or not width or not heads or given == width // heads:
        return ""
    return (
        f"config.json of the model has head_dim = {given}, and SGLang gives heads of {fields['model_type']} "
        f"hidden_size / num_attention_heads = {width // heads} dimensions"
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
