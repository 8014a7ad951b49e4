"""Write an adapter as a folder of PEFT, and the model with the adapter merged into its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from relax_actors.config import Config
from relax_actors.data.adapter import CONFIG, WEIGHTS, AdapterModules, of_experts, weight_name
from relax_actors.engines.ranks.model_folder import write_shared
from relax_actors.engines.torch.adapter import MARKS, Adapter
from relax_actors.engines.torch.lora_linear import SLOTS
from relax_actors.engines.torch.model import copy_into, tensors_of
from relax_actors.engines.torch.peft_tensors import to_peft
from relax_actors.engines.torch.score_model import complete_config, model_maker
from relax_actors.engines.torch.sharding import Whole
from relax_actors.engines.torch.shared_source import SharedSource
from relax_actors.weights import files as weights

FOLDER = "adapter"
"""Folder of the adapter in the model folder at the end of a run."""


def export_adapter(adapter: Adapter, folder: Path, config: Config, sharding: Whole) -> None:
    """Write the adapter of a run as a PEFT folder in `folder`, and with `lora.export_merged` the whole model beside it.

    All ranks that share the model must call it.

    Raises:
        OSError: writing failed; errno is ENOSPC if the disk is full.
    """
    dtype = getattr(torch, config.trainer.precision)
    if config.lora is not None and config.lora.export_merged:
        _write_merged(adapter, folder, config, sharding)
    tensors = {name: sharding.gather(tensor, dtype) for name, tensor in adapter.tensors().items()}
    if sharding.rank == 0:
        write_adapter(tensors, adapter.modules, folder / FOLDER, config)


def _write_merged(adapter: Adapter, folder: Path, config: Config, sharding: Whole) -> None:
    dtype = getattr(torch, config.trainer.precision)

    def make(**settings: Any) -> PreTrainedModel:
        model = model_maker(config)(**settings)
        complete_config(model, config)
        return model

    if not sharding.is_whole:
        write_shared(folder, make, merged_source(adapter, dtype, sharding), config.trainer.precision)
        return
    model = make(dtype=dtype)
    copy_into(model, adapter.merged(), "training")
    with weights.disk_errors(folder):
        model.save_pretrained(folder)


def merged_source(adapter: Adapter, dtype: torch.dtype, sharding: Whole) -> SharedSource:
    """Return the weights of a model that ranks share, with the adapter added: in float32, and rounded once."""
    tensors = {name: tensor for name, tensor in tensors_of(adapter.model).items() if SLOTS not in name}
    layers = {id(tensors[weight_name(name)]): layer for name, layer in adapter.layers.items()}

    def gather(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        whole, layer = sharding.gather(tensor, dtype), layers.get(id(tensor))
        return whole if layer is None else layer.merged(whole)

    return SharedSource(tensors, dtype, sharding, gather, nullcontext())


def write_adapter(tensors: Mapping[str, Tensor], modules: AdapterModules, folder: Path, config: Config) -> None:
    """Write an adapter as `PeftModel.from_pretrained` reads it, to a folder that is empty or new.

    Raises:
        OSError: writing failed; errno is ENOSPC if the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights.save(to_peft({name: t for name, t in tensors.items() if name not in MARKS}), folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(_peft_config(modules, config), indent=1, sort_keys=True))


def _peft_config(modules: AdapterModules, config: Config) -> dict[str, object]:
    form, scores = modules.form, config.algorithm.trains_scores
    kind = "CAUSAL_LM" if not scores else "TOKEN_CLS" if config.algorithm.rows == "steps" else "SEQ_CLS"
    return {
        "peft_type": "LORA",
        "task_type": kind,
        "base_model_name_or_path": str(config.model_path.absolute()),
        "r": form.rank,
        "lora_alpha": form.alpha,
        "use_rslora": form.rslora,
        "lora_dropout": form.dropout,
        "target_modules": _short_names(modules, [name for name in modules.targets if not of_experts(name)]),
        "target_parameters": [name for name in modules.targets if of_experts(name)] or None,
        "modules_to_save": list(modules.saved) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _short_names(modules: AdapterModules, layers: Sequence[str]) -> list[str]:
    """Return the last parts of the names of linear layers, if these name no other layer; else full names."""
    ends = sorted({name.rpartition(".")[2] for name in layers})
    others = {name for name in modules.linear if not of_experts(name)}.difference(layers)
    return sorted(layers) if any(name.rpartition(".")[2] in ends for name in others) else ends
