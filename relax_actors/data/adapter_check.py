"""Check [lora] against the files of the model, without torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from relax_actors.config import Config
from relax_actors.data.adapter import (
    DOWN,
    EXPERT,
    EXPERTS_DOWN,
    GATE_UP,
    UP,
    AdapterForm,
    form_of,
    match_saved,
    match_targets,
    of_experts,
    own_names,
    weight_name,
)
from relax_actors.data.model_folder import stored_shapes
from relax_actors.errors import ConfigError
from relax_actors.media.family import family_of

_EMBEDDINGS = ("embed_tokens", "wte", "wpe", "word_embeddings", "embed_in", "embedding")
"""Last parts of the names of embeddings, whose weights are matrices like those of linear layers."""
MATRIX = 2
"""Dimensions of the weight of a linear layer."""
_MATRIX_OF_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_ROUTERS = ("gate", "router")
"""Last parts of the names of routers, which are no linear layers of transformers."""
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Types of models whose layers are Conv1D of transformers, with transposed weights."""


def check_adapter(config: Config, folder: Path) -> Iterator[str]:
    """Refuse an adapter that the model cannot have, and note its size.

    Raises:
        ConfigError: the folder has no weights, quantised ones or no linear layers; a target matches nothing; the
            adapter to start from is of another model; or a setting has no meaning with [lora].
    """
    if config.lora is None:
        return
    check_adapter_settings(config, folder)
    if config.model.path is None or not any(folder.glob("*.safetensors")):
        msg = (
            "[lora] trains an adapter of a trained model, and this run's model starts from random weights; set "
            "model.path to a folder with *.safetensors, or remove [lora]"
        )
        raise ConfigError(msg)
    form, shapes = form_of(config.lora), stored_shapes(folder)
    if family_of(folder) is not None:
        yield "lora.targets are matched when the trainer starts: files of this model have other names than its layers"
        return
    modules = {name.rpartition(".")[0] for name in shapes}
    linear, experts = linear_layers(shapes), expert_layers(shapes)
    targets, saved = matched_layers(shapes, form), match_saved(modules, form.saved)
    _check_tied(folder, saved)
    if form.path is not None:
        _check_shapes(form, form.path, shapes)
    adapted = sum(map(of_experts, targets))
    if adapted and form.dropout:
        msg = (
            f"lora.dropout = {form.dropout:g} with experts in lora.targets: PEFT drops no inputs of experts, "
            "and could not read the adapter; set lora.dropout = 0"
        )
        raise ConfigError(msg)
    size = adapter_parameters(form, shapes | experts, targets, saved)
    total = sum(math.prod(shape) for shape in shapes.values())
    of_all = f"{len(targets) - adapted} of {len(linear)} linear layers"
    if any(EXPERT in name for name in shapes):
        of_all += f" and {adapted} of {len(experts)} tensors of experts" if adapted else ", none of experts"
    yield (
        f"adapter: rank {form.rank}, scale {form.scale:g}, {of_all}, {size} parameters, {100 * size / total:.2g} % of "
        "the model"
    )


def matched_layers(shapes: Mapping[str, list[int]], form: AdapterForm) -> list[str]:
    """Return the layers that an adapter changes, by a model folder's files; none if it has only config.json."""
    if not shapes:
        return []
    modules = {name.rpartition(".")[0] for name in shapes}
    return match_targets(linear_layers(shapes), modules, form.targets, expert_layers(shapes))


def linear_layers(shapes: Mapping[str, list[int]]) -> set[str]:
    """Return the names of the linear layers in the files of a model folder, by names and shapes."""

    def is_linear(name: str, shape: list[int]) -> bool:
        is_matrix = len(shape) == MATRIX and name.endswith(".weight")
        return is_matrix and name.split(".")[-2] not in (*_EMBEDDINGS, *_ROUTERS) and EXPERT not in name

    return {name.removesuffix(".weight") for name, shape in shapes.items() if is_linear(name, shape)}


def expert_layers(shapes: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Return the tensors of experts with shapes, by a model folder's files.

    Files hold them joined, or each matrix of each expert apart. Transposed tensors and those with biases are left out.
    """
    joined = {name: shape for name, shape in shapes.items() if of_experts(name)}
    apart: dict[str, dict[str, list[int]]] = {}
    for name, shape in shapes.items():
        if (match := _MATRIX_OF_EXPERT.fullmatch(name)) is not None:
            of_layer = apart.setdefault(match[1], {})
            count = max(of_layer.get(match[3], [0])[0], int(match[2]) + 1)
            of_layer[match[3]] = [count, *shape]
    for layer, matrices in apart.items():
        if matrices.keys() == {"gate", "up", "down"}:
            experts, rows, columns = matrices["gate"]
            joined |= {layer + GATE_UP: [experts, 2 * rows, columns], layer + EXPERTS_DOWN: matrices["down"]}
    layers: dict[str, list[int]] = {}
    for layer in sorted(name.removesuffix(GATE_UP) for name in joined if name.endswith(GATE_UP)):
        gate_up, down = joined[layer + GATE_UP], joined.get(layer + EXPERTS_DOWN, [0, 0, 0])
        if gate_up[1:] == [2 * down[2], down[1]] and f"{layer}{GATE_UP}_bias" not in shapes:
            layers |= {layer + GATE_UP: gate_up, layer + EXPERTS_DOWN: down}
    return layers


def adapter_parameters(form: AdapterForm, shapes: Mapping[str, list[int]], targets: list[str], saved: list[str]) -> int:
    """Return the number of trained parameters: rank * (in + out) a matrix, and saved modules."""
    weights = [shapes[weight_name(name)] for name in targets]
    of_targets = sum(math.prod(shape[:-2]) * form.rank * sum(shape[-2:]) for shape in weights)
    return of_targets + sum(math.prod(shape) for n, shape in shapes.items() if n.rpartition(".")[0] in saved)


def check_adapter_settings(config: Config, folder: Path) -> None:
    """Refuse settings, and types of models by their config.json, with which no adapter can be trained.

    Raises:
        ConfigError: names the setting or the type.
    """
    if config.lora is None:
        return
    if config.trainer.warm_start is not None:
        msg = (
            "trainer.warm_start trains the model before version 0, and [lora] leaves it as it is; train a stage with "
            'algorithm.name = "sft" first, and leave trainer.warm_start out'
        )
        raise ConfigError(msg)
    if config.trainer.fake_quant is not None:
        msg = "[trainer.fake_quant] with [lora]: an adapter is not trained for few bits; leave one of them out"
        raise ConfigError(msg)
    if config.trainer.freeze:
        msg = "trainer.freeze: with [lora] all weights but the adapter's are frozen; leave trainer.freeze out"
        raise ConfigError(msg)
    _check_type(folder)


def _check_type(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    if (kind := fields.get("model_type")) in _CONV1D:
        msg = (
            f"model.path {folder} is of the type {kind}, whose layers are Conv1D and have no adapter here; choose a "
            "model with linear layers, or remove [lora]"
        )
        raise ConfigError(msg)
    if (quantised := fields.get("quantization_config")) is not None:
        kind = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        msg = (
            f"model.path {folder} has quantised weights ({kind}): training an adapter of them (QLoRA) needs kernels "
            "for CUDA that no engine here has; set model.path to the model in bfloat16 or float32"
        )
        raise ConfigError(msg)


def _check_tied(folder: Path, saved: list[str]) -> None:
    fields = json.loads((folder / "config.json").read_text())
    ends = {name.rpartition(".")[2] for name in saved}
    if fields.get("tie_word_embeddings") and (tied := ends & {"lm_head", *_EMBEDDINGS}):
        msg = (
            f"lora.modules_to_save: {min(tied)} shares its weights with the other end of the model "
            "(tie_word_embeddings), which PEFT would train apart; leave it out"
        )
        raise ConfigError(msg)


def _check_shapes(form: AdapterForm, folder: Path, shapes: Mapping[str, list[int]]) -> None:
    """Compare the adapter to start from with the layers of the model."""
    stored, known = stored_shapes(folder), dict(shapes) | expert_layers(shapes)
    for name, given in own_names(folder).items():
        layer = name.removesuffix(DOWN).removesuffix(UP)
        expected = known.get(name if layer == name else weight_name(layer))
        if expected is not None and layer != name:
            rank = math.prod(expected[:-2]) * form.rank
            expected = [rank, expected[-1]] if name.endswith(DOWN) else [expected[-2], rank]
        if (shape := stored[given]) != expected:
            msg = (
                f"lora.path {folder} is an adapter of another model or rank: {name} has shape {shape}, with this model "
                f"it has {expected}"
            )
            raise ConfigError(msg)
