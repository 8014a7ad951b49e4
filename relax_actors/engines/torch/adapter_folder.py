"""Write an adapter as a folder of PEFT, and the model with the adapter merged into its weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from relax_actors.config import Config
from relax_actors.data.adapter import CONFIG, PREFIX, WEIGHTS
from relax_actors.engines.torch.adapter import MARKS, Adapter
from relax_actors.engines.torch.model import copy_into
from relax_actors.engines.torch.score_model import complete_config, model_maker
from relax_actors.weights import files as weights

FOLDER = "adapter"
"""Folder of the adapter in the model folder at the end of a run."""


def export_adapter(adapter: Adapter, folder: Path, config: Config) -> None:
    """Write the adapter of a run as a PEFT folder, and with `lora.export_merged` the whole model beside it.

    Args:
        adapter: the adapter.
        folder: folder of the model; the adapter gets a folder of its own in it.
        config: configuration of the run.

    Raises:
        OSError: writing failed; errno is ENOSPC if the disk is full.
    """
    dtype = getattr(torch, config.trainer.precision)
    write_adapter(adapter, folder / FOLDER, config, dtype)
    if config.lora is None or not config.lora.export_merged:
        return
    model = model_maker(config)(dtype=dtype)
    copy_into(model, adapter.merged(), "training")
    complete_config(model, config)
    with weights.disk_errors(folder):
        model.save_pretrained(folder)


def write_adapter(adapter: Adapter, folder: Path, config: Config, dtype: torch.dtype) -> None:
    """Write the adapter as `PeftModel.from_pretrained` reads it, in a dtype; errors as `export_adapter`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {PREFIX + name: t.to(dtype) for name, t in adapter.tensors().items() if name not in MARKS}
    weights.save(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(_peft_config(adapter, config), indent=1, sort_keys=True))


def _peft_config(adapter: Adapter, config: Config) -> dict[str, object]:
    form, scores = adapter.form, config.algorithm.trains_scores
    kind = "CAUSAL_LM" if not scores else "TOKEN_CLS" if config.algorithm.rows == "steps" else "SEQ_CLS"
    return {
        "peft_type": "LORA",
        "task_type": kind,
        "base_model_name_or_path": str(config.model_path.absolute()),
        "r": form.rank,
        "lora_alpha": form.alpha,
        "use_rslora": form.rslora,
        "lora_dropout": form.dropout,
        "target_modules": _short_names(adapter),
        "modules_to_save": adapter.saved or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _short_names(adapter: Adapter) -> list[str]:
    """Return the last parts of the names of the layers, if these name no other layer; else full names."""
    ends = sorted({name.rpartition(".")[2] for name in adapter.layers})
    others = (name for name, module in adapter.model.named_modules() if isinstance(module, torch.nn.Linear))
    if any(name.rpartition(".")[2] in ends and name not in adapter.layers for name in others):
        return sorted(adapter.layers)
    return ends
