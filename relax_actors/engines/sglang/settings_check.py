"""Checks of a run's settings and model for servers, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relax_actors.config import Config
from relax_actors.data.adapter import form_of
from relax_actors.data.model_folder import measure
from relax_actors.data.nested_config import text_fields
from relax_actors.engines.sglang import presence
from relax_actors.engines.sglang.adapter_form import MERGE, check_served
from relax_actors.engines.torch.architectures import causal_model_class
from relax_actors.errors import ConfigError

EXPERTS = "--moe-runner-backend"
"""Argument of a server that chooses its kernels of experts."""


def check_model(config: Config, fields: Mapping[str, Any], model_type: str, *, reads_text_only: bool) -> None:
    """Refuse a model that SGLang cannot load or computes otherwise.

    `fields` are the part of config.json that describes the model of text.

    Raises:
        ConfigError: names the field, or the setting to change.
    """
    known = presence.TEXT_WITH_EXPERTS
    if reads_text_only and presence.has_experts(fields) and model_type not in known:
        msg = (
            f'rollout.backend = "sglang" with a model of type {model_type}: among text models with experts '
            f'only {", ".join(known)} are supported; use "transformers"'
        )
        raise ConfigError(msg)
    if why := presence.difference(fields):
        msg = f'rollout.backend = "sglang": {why}, or use "transformers"'
        raise ConfigError(msg)
    heads = fields.get("num_attention_heads", 0)
    if heads % (parallel := config.rollout.sglang.tensor_parallel):
        msg = (
            f"rollout.sglang.tensor_parallel = {parallel} does not divide the model's num_attention_heads = "
            f"{heads}; lower it"
        )
        raise ConfigError(msg)


def check_held(config: Config, fields: Mapping[str, Any]) -> Iterator[str]:
    """Refuse a policy whose weights or experts a server would hold in a form that updates and replays cannot follow.

    Raises:
        ConfigError: config.json names quantised weights, or an argument chooses kernels that report no experts.
    """
    if quantised := fields.get("quantization_config"):
        kind = quantised.get("quant_method", "unnamed") if isinstance(quantised, dict) else quantised
        msg = (
            f'rollout.backend = "sglang": config.json of the model has quantization_config ({kind}), and updates hold '
            "weights that are not quantised, so its server could not take them; use the folder of the model in "
            "bfloat16, without that field"
        )
        raise ConfigError(msg)
    if fields.get("model_type") != "gpt_oss":
        return
    given = [argument.partition("=")[0] for argument in config.rollout.sglang.arguments]
    if config.trainer.router_replay and EXPERTS in given:
        msg = (
            f"rollout.sglang.arguments: the run sets {EXPERTS} itself, because only some kernels of SGLang report the "
            "experts of gpt_oss; leave it out, or set trainer.router_replay = false"
        )
        raise ConfigError(msg)
    yield "SGLang holds the attention sinks of gpt_oss in bfloat16, whatever rollout.sglang.dtype is"


def check_class(fields: Mapping[str, Any], model: Path) -> None:
    """Refuse a model whose class the installed SGLang lacks."""
    name = next(iter(fields.get("architectures") or ()), "") or causal_model_class(model)
    if name and not presence.serves(name):
        msg = (
            f'rollout.backend = "sglang" with a model of type {measure(model).model_type}: the installed SGLang has no '
            f'model class {name}; use "transformers"'
        )
        raise ConfigError(msg)


def check_places(config: Config) -> None:
    """Check that samples may wait for others, and that some do; raises ConfigError."""
    places, most = (
        config.rollout.sglang.max_concurrent_samples,
        config.rollout.max_concurrent_prompts * config.most_samples,
    )
    if places is None:
        return
    setting = f"rollout.sglang.max_concurrent_samples = {places}"
    if config.run.deterministic:
        msg = f"{setting} makes batches depend on time, which run.deterministic = true forbids; leave it out"
        raise ConfigError(msg)
    if places >= most:
        msg = (
            f"{setting} has no effect: rollout.max_concurrent_prompts = {config.rollout.max_concurrent_prompts} rows "
            f"have {most} samples; lower it, or raise rollout.max_concurrent_prompts"
        )
        raise ConfigError(msg)


def check_adapter(config: Config, model: Path, *, reads_text_only: bool) -> None:
    """Refuse an adapter that servers cannot serve.

    Raises:
        ConfigError: there is no adapter to merge, servers cannot compute with it, or the model has towers, which have
            other names in SGLang.
    """
    settings = config.rollout.sglang
    if config.lora is None:
        if settings.merge_adapter:
            msg = "rollout.sglang.merge_adapter = true, but the run trains no adapter; add [lora], or leave it out"
            raise ConfigError(msg)
        return
    if not reads_text_only:
        msg = 'rollout.backend = "sglang" with [lora] serves models of text alone; use "transformers"'
        raise ConfigError(msg)
    if settings.merge_adapter:
        return
    if settings.weights != "disk":
        msg = (
            f'rollout.sglang.weights = "{settings.weights}" is for full sets of weights, and servers get the adapter '
            f"of [lora] in requests; leave it out, or {MERGE}"
        )
        raise ConfigError(msg)
    fields = text_fields(json.loads((model / "config.json").read_text()))
    check_served(form_of(config.lora), model, has_experts=presence.has_experts(fields))
