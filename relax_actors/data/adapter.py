"""Form of an adapter: rank, scale, changed layers, and the files in which PEFT keeps it."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from relax_actors.config.lora import ALL_LINEAR, LoraSection
from relax_actors.data.model_folder import stored_shapes
from relax_actors.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a PEFT folder."""
PREFIX = "base_model.model."
"""Beginning of all names of tensors in a PEFT folder; the rest is the name in the model."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of A and B, behind the name of the layer."""
HEADS = ("lm_head", "score")
"""Last parts of the names of output heads, which "all-linear" leaves out."""
EXPERT = ".experts."
"""Part of the names of experts, whose matrices transformers joins to one tensor of a layer."""
GATE_UP, EXPERTS_DOWN = ".experts.gate_up_proj", ".experts.down_proj"
"""Ends of the names of the tensors of experts, `[experts, 2 * width, hidden]` and `[experts, hidden, width]`."""
_NO_EXPERT = (
    'Experts get adapters by the names "experts.gate_up_proj" and "experts.down_proj" in lora.targets, if transformers '
    "holds those of a layer in two tensors without biases; use these names, or leave experts out"
)
INNER = ".base_layer"
"""End of the name of a module that PEFT has wrapped twice, for the first of two tensors with an adapter."""
_PATTERN = frozenset("*?[")
_PLAIN: dict[str, Any] = {
    "use_dora": False,
    "bias": "none",
    "lora_bias": False,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "layer_replication": None,
    "use_qalora": False,
    "use_bdlora": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "velora_config": None,
}
"""Settings of adapter_config.json with the only value that an adapter of this package has."""
_DRAWN = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base as it is; others, such as "pissa", also change its weights."""


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """Shape of an adapter; see [lora].

    Attributes:
        rank: rank of A and B.
        alpha: numerator of the scale.
        rslora: whether `alpha` is divided by the square root of `rank`.
        dropout: share of the inputs of A that are dropped.
        targets: "all-linear", or names and patterns of linear layers.
        saved: names of modules that are trained as a whole.
        path: PEFT folder with the first weights; None for B = 0.
    """

    rank: int
    alpha: float
    rslora: bool
    dropout: float
    targets: str | tuple[str, ...]
    saved: tuple[str, ...]
    path: Path | None = None

    @property
    def scale(self) -> float:
        """Factor of B A x."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True, slots=True)
class AdapterModules:
    """Modules of a model that an adapter concerns, by the names of transformers.

    Attributes:
        form: form of the adapter.
        targets: linear layers with an adapter, and tensors of experts.
        saved: modules that are trained as a whole.
        linear: all linear layers, and all tensors of experts.
    """

    form: AdapterForm
    targets: tuple[str, ...]
    saved: tuple[str, ...]
    linear: tuple[str, ...]


def of_experts(layer: str) -> bool:
    """Whether a layer is a tensor of experts: A `[experts, rank, in]`, B `[experts, out, rank]`."""
    return layer.endswith((GATE_UP, EXPERTS_DOWN))


def weight_name(layer: str) -> str:
    """Return the name of the weight of a layer in the model."""
    return layer if of_experts(layer) else f"{layer}.weight"


def form_of(section: LoraSection) -> AdapterForm:
    """Return the form of a run's adapter, by its settings or the folder it starts from.

    Raises:
        ConfigError: the folder holds no LoRA adapter that can be trained here, or a setting contradicts it.
    """
    own = AdapterForm(
        section.rank, section.alpha, section.rslora, section.dropout, section.targets, section.modules_to_save
    )
    if section.path is None:
        return own
    given = _read_form(section.path)
    for key, setting in (("rank", "rank"), ("alpha", "alpha"), ("rslora", "rslora")):
        if setting in section.model_fields_set and getattr(own, key) != getattr(given, key):
            msg = (
                f"lora.{setting} = {getattr(own, key)}, but the adapter in lora.path {section.path} has "
                f"{getattr(given, key)}; leave lora.{setting} out"
            )
            raise ConfigError(msg)
    if fixed := sorted({"targets", "modules_to_save"} & section.model_fields_set):
        msg = f"lora.{fixed[0]} follows from the adapter in lora.path {section.path}; leave lora.{fixed[0]} out"
        raise ConfigError(msg)
    if not given.targets and not given.saved:
        msg = f"lora.path {section.path}: {WEIGHTS} has no tensors {PREFIX}*; save it with PEFT's save_pretrained"
        raise ConfigError(msg)
    dropout = own.dropout if "dropout" in section.model_fields_set else given.dropout
    return AdapterForm(given.rank, given.alpha, given.rslora, dropout, given.targets, given.saved, section.path)


def _read_form(folder: Path) -> AdapterForm:
    """Read the form of the adapter in a PEFT folder; errors as `form_of`."""
    try:
        body: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        kind, rank, alpha = str(body["peft_type"]), int(body["r"]), float(body["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        msg = f"lora.path {folder} is no folder of a PEFT adapter: {CONFIG}: {type(error).__name__} {error}"
        raise ConfigError(msg) from error
    if kind != "LORA":
        msg = f"lora.path {folder} holds an adapter of the type {kind}; only LORA can be trained"
        raise ConfigError(msg)
    for setting, value in _PLAIN.items():
        if (body.get(setting) or value) != value:
            msg = f"lora.path {folder}: {CONFIG} has {setting} = {body[setting]!r}; only {value!r} can be trained"
            raise ConfigError(msg)
    if (drawn := body.get("init_lora_weights")) not in _DRAWN:
        msg = (
            f"lora.path {folder}: {CONFIG} has init_lora_weights = {drawn!r}, which also changed the weights of the "
            "base; convert the adapter by save_pretrained(..., path_initial_model_for_weight_conversion=...) of PEFT"
        )
        raise ConfigError(msg)
    if not (folder / WEIGHTS).is_file():
        msg = f"lora.path {folder} has no {WEIGHTS}; save the adapter with PEFT's save_pretrained"
        raise ConfigError(msg)
    names = own_names(folder)
    targets = tuple(name.removesuffix(DOWN) for name in names if name.endswith(DOWN))
    saved = tuple(dict.fromkeys(n.rpartition(".")[0] for n in names if not n.endswith((DOWN, UP))))
    dropout = float(body.get("lora_dropout") or 0.0)
    return AdapterForm(rank, alpha, bool(body.get("use_rslora")), dropout, targets, saved)


def own_names(folder: Path) -> dict[str, str]:
    """Return tensor names of a PEFT folder by ours: with `PREFIX`, experts nested.

    PEFT wraps a module of experts for each tensor with an adapter, gate and up projection first. The names do not say
    which tensor it is.

    Raises:
        ConfigError: the folder does not say either, or target_parameters names other tensors than those of experts.
    """
    names: dict[str, str] = {}
    given = [name for name in stored_shapes(folder) if name.startswith(PREFIX)]
    parameters = json.loads((folder / CONFIG).read_text()).get("target_parameters") or ()
    if other := next((name for name in parameters if not of_experts(f".{name}")), None):
        msg = f"lora.path {folder}: {CONFIG} has {other!r} in target_parameters; only experts have such an adapter here"
        raise ConfigError(msg)
    for stored in given:
        name = stored.removeprefix(PREFIX)
        end = next((end for end in (DOWN, UP) if name.endswith(end)), "")
        module = name.removesuffix(end).removesuffix(INNER)
        if end and module.endswith(EXPERT[:-1]):
            is_inner = name.removesuffix(end).endswith(INNER)
            has_inner = f"{PREFIX}{module}{INNER}{end}" in given
            own = [layer for layer in (GATE_UP, EXPERTS_DOWN) if _is_named(module, layer, parameters)]
            if has_inner:
                own = [GATE_UP] if is_inner else [EXPERTS_DOWN]
            if len(own) != 1:
                msg = f"lora.path {folder}: {CONFIG} does not name the tensor of {stored} in target_parameters"
                raise ConfigError(msg)
            name = module.removesuffix(EXPERT[:-1]) + own[0] + end
        names[name] = stored
    return names


def _is_named(module: str, layer: str, parameters: Sequence[str]) -> bool:
    name = module.removesuffix(EXPERT[:-1]) + layer
    return any(name == known or name.endswith(f".{known}") for known in parameters)


def match_targets(
    linear: Collection[str], modules: Collection[str], targets: str | Sequence[str], experts: Collection[str] = ()
) -> list[str]:
    """Return the layers and tensors of experts of `lora.targets`, by name.

    Args:
        linear: full names of all linear layers of the model.
        modules: full names of all modules with weights, linear ones included.
        targets: see [lora].
        experts: full names of the tensors of experts that can have an adapter; an entry must name experts to match one.

    Raises:
        ConfigError: an entry matches no linear layer, or an output head; the error has the nearest names. Or the model
            has no linear layer.
    """
    layers: set[str] = set()
    for target in (targets,) if isinstance(targets, str) else targets:
        if target == ALL_LINEAR:
            matched = {name for name in linear if name.rpartition(".")[2] not in HEADS}
            if not matched:
                msg = (
                    'lora.targets = "all-linear" matches nothing: the model has no linear layer besides its output '
                    "head; choose another model, or remove [lora]"
                )
                raise ConfigError(msg)
        else:
            # The last part of a name alone means linear layers.
            candidates = (*linear, *experts) if "experts" in target else linear
            matched = {name for name in candidates if _matches(name, target)}
        if heads := sorted(name for name in matched if name.rpartition(".")[2] in HEADS):
            msg = (
                f"lora.targets: {target!r} matches the output head {heads[0]}, which has no adapter; name it in "
                "lora.modules_to_save to train it as a whole"
            )
            raise ConfigError(msg)
        if not matched:
            raise ConfigError(_no_target(target, linear, modules, experts))
        layers |= matched
    return sorted(layers)


def match_saved(modules: Collection[str], saved: Sequence[str]) -> list[str]:
    """Return the modules of `lora.modules_to_save` by name; raises ConfigError."""
    saved_modules: set[str] = set()
    for name in saved:
        matched = {module for module in modules if _matches(module, name)}
        if any(_is_expert(known) for known in (name, *matched)):
            msg = f"lora.modules_to_save: {name!r} names experts, which are not trained as a whole. {_NO_EXPERT}"
            raise ConfigError(msg)
        if not matched:
            msg = f"lora.modules_to_save: {name!r} matches no module with weights; near it: {_near(name, modules)}"
            raise ConfigError(msg)
        saved_modules |= matched
    return sorted(saved_modules)


def _matches(name: str, target: str) -> bool:
    if _PATTERN & set(target):
        return fnmatchcase(name, target)
    return name == target or name.endswith(f".{target}")


def _is_expert(name: str) -> bool:
    return EXPERT in f".{name}."


def _no_target(target: str, linear: Collection[str], modules: Collection[str], experts: Collection[str]) -> str:
    others = sorted(name for name in (*modules, *experts) if _matches(name, target))
    if any(_is_expert(name) for name in (target, *others)):
        return f"lora.targets: {target!r} names no layer that can have an adapter. {_NO_EXPERT}"
    if others:
        return (
            f"lora.targets: {target!r} matches {others[0]}, which is no linear layer; name it in lora.modules_to_save "
            "to train it as a whole"
        )
    return f"lora.targets: {target!r} matches no layer of the model; near it: {_near(target, linear)}"


def _near(target: str, names: Collection[str]) -> str:
    """Return the names closest to a target, by their last parts or in full."""
    known = sorted(names) if "." in target else sorted({name.rpartition(".")[2] for name in names})
    close = difflib.get_close_matches(target, known, 3, 0.5) or known[:6]
    return ", ".join(close)
