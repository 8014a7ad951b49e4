"""Refuse adapters that Megatron-Core cannot train, before anything starts."""

from __future__ import annotations

from pathlib import Path

from relax_actors.config import Config
from relax_actors.data.adapter import AdapterForm, form_of, match_saved, of_experts
from relax_actors.data.adapter_check import matched_layers
from relax_actors.data.model_folder import stored_shapes
from relax_actors.engines.megatron.layout import Layout
from relax_actors.errors import ConfigError
from relax_actors.media.family import family_of

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that Megatron-Core stores in one parameter."""
_SHARED_GATE = "shared_expert_gate"
"""Linear layer that Megatron-Core computes in the module of the shared experts."""


def check_adapter(config: Config, layout: Layout, model: Path, role: str) -> None:
    """Refuse an adapter that a layout of Megatron-Core cannot train.

    Raises:
        ConfigError: the model has towers, a target or a module is only a part of what Megatron-Core has, or dropped
            inputs could not be dropped again.
    """
    if config.lora is None:
        return
    setting = f'{role}.backend = "megatron" with [lora]'
    if family_of(model) is not None:
        msg = (
            f"{setting} trains models of text: the layers of towers are not among those of Megatron-Core that get "
            f'adapters; set {role}.backend = "torch"'
        )
        raise ConfigError(msg)
    form = form_of(config.lora)
    _check_modules(form, model, setting)
    experts = next((name for name in matched_layers(stored_shapes(model), form) if of_experts(name)), None)
    if experts is not None and layout.expert_tensor > 1:
        msg = (
            f"{setting}: lora.targets match {experts}, and {role}.megatron.expert_tensor_parallel = "
            f"{layout.expert_tensor} shares each expert among ranks, whose adapters would need an exchange of their "
            f"own; set {role}.megatron.expert_tensor_parallel = 1"
        )
        raise ConfigError(msg)
    if form.dropout and layout.pipeline > 1 and config.trainer.recompute == "full":
        msg = (
            f"lora.dropout = {form.dropout:g} with trainer.recompute and {role}.megatron.pipeline_parallel = "
            f"{layout.pipeline}: a stage computes micro-batches again in another order than it drew the dropped "
            'inputs; set lora.dropout = 0 or trainer.recompute = "none"'
        )
        raise ConfigError(msg)


def _check_modules(form: AdapterForm, model: Path, setting: str) -> None:
    if not (shapes := stored_shapes(model)):  # a folder with only config.json
        return
    modules = {name.rpartition(".")[0] for name in shapes}
    for target in matched_layers(shapes, form):
        if target.endswith(_SHARED_GATE):
            msg = (
                f"{setting}: lora.targets match {target}, which Megatron-Core computes in the module of the shared "
                f'experts; name the other layers in lora.targets, or set the backend to "torch"'
            )
            raise ConfigError(msg)
    saved = set(match_saved(modules, form.saved))
    for name in sorted(saved):
        layer, _, last = name.rpartition(".")
        for group in _FUSED:
            others = {f"{layer}.{part}" for part in group} & modules
            if last in group and len(others) == len(group) and not others <= saved:
                msg = (
                    f"{setting}: lora.modules_to_save matches {name}, which Megatron-Core stores in one parameter with "
                    f"{', '.join(sorted(others - saved))}; name all of them or none of them"
                )
                raise ConfigError(msg)
