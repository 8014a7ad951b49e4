"""The form of an adapter on a server: which layers it can have there, and how they are named. Imports no torch.

SGLang joins q, k and v to one layer, and gate and up to another. An adapter of one of them is an adapter of all, whose
other matrices are zero.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from relax_actors.config import Config
from relax_actors.data.adapter import AdapterForm, form_of, of_experts
from relax_actors.data.adapter_check import matched_layers
from relax_actors.data.model_folder import stored_shapes
from relax_actors.errors import ConfigError

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Last parts of the names of layers that SGLang joins."""
OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SERVED = (*OF_ATTENTION, "gate_proj", "up_proj", "down_proj")
"""Last parts of the names of layers to which SGLang adds an adapter as the trainer does. In a model with experts the
last three would name the experts, too, whose adapters SGLang computes on CUDA alone."""
ADAPTERS_TOGETHER = 3
"""Adapters that a server computes with in one batch: the base, the version in use and the one before it."""
MERGE = "set rollout.sglang.merge_adapter = true to serve it added to the weights"


def adapted_layers(folder: Path, form: AdapterForm) -> list[str]:
    """Return the full names of the layers of a model folder that an adapter changes; raises as `match_targets`."""
    return matched_layers(stored_shapes(folder), form)


def siblings(layer: str) -> list[str]:
    """Return the full names of the layers that SGLang joins to a layer, itself included."""
    parent, _, name = layer.rpartition(".")
    return [f"{parent}.{other}" for group in JOINED if name in group for other in group] or [layer]


def short_names(layers: Collection[str]) -> list[str]:
    """Return the last parts of the names of layers and their siblings."""
    return sorted({name.rpartition(".")[2] for layer in layers for name in siblings(layer)})


def peft_config(form: AdapterForm, layers: Collection[str]) -> dict[str, Any]:
    """Return the contents of adapter_config.json for a server.

    SGLang divides alpha by the rank and knows no rsLoRA, so the scale is in alpha.
    """
    return {
        "peft_type": "LORA",
        "r": form.rank,
        "lora_alpha": form.scale * form.rank,
        "target_modules": short_names(layers),
        "bias": "none",
    }


def check_served(form: AdapterForm, folder: Path, *, has_experts: bool) -> None:
    """Refuse an adapter that a server cannot compute with beside the weights; raises ConfigError, naming the part."""
    if form.saved:
        msg = f"lora.modules_to_save = {list(form.saved)}: SGLang's adapters have no whole modules; {MERGE}"
        raise ConfigError(msg)
    layers, stored = adapted_layers(folder, form), stored_shapes(folder)
    names, served = {layer.rpartition(".")[2] for layer in layers}, OF_ATTENTION if has_experts else SERVED
    if others := sorted(names.difference(served)):
        where = " in a model with experts" if has_experts else ""
        msg = f"lora.targets match layers {others}: SGLang's adapters change only {', '.join(served)}{where}; {MERGE}"
        raise ConfigError(msg)
    if joined := next((name for name in stored if of_experts(name)), None):
        msg = f"the model's files hold experts joined ({joined}), and SGLang reads those of each expert; {MERGE}"
        raise ConfigError(msg)
    for layer in layers:
        if missing := [name for name in siblings(layer) if f"{name}.weight" not in stored]:
            msg = f"lora.targets match {layer}: SGLang joins it with {missing[0]}, which the model lacks; {MERGE}"
            raise ConfigError(msg)


def adapter_arguments(config: Config, *, cuda: bool) -> list[str]:
    """Return the arguments of a server for the adapter of a run; empty if it gets full sets of weights."""
    if config.lora is None or config.rollout.sglang.merge_adapter:
        return []
    form = form_of(config.lora)
    names = short_names(adapted_layers(config.model_path, form))
    backend = () if cuda else ("--lora-backend", "torch_native")
    limits = ("--max-lora-rank", str(form.rank), "--max-loras-per-batch", str(ADAPTERS_TOGETHER))
    return ["--enable-lora", "--lora-strict-loading", *limits, *backend, "--lora-target-modules", *names]
