"""Checkpoints: each rank writes its shards, any layout loads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from torch import distributed

from relax_actors.algorithms.controllers import Coefficients
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore import shard_files
from relax_actors.engines.megatron.mcore.model_chunks import ModelChunks
from relax_actors.engines.megatron.mcore.optimizer import Optimizer
from relax_actors.engines.torch.background import run_in_background
from relax_actors.errors import ConfigError
from relax_actors.weights import files as weights

STATE = "state"
REFERENCE = "reference."
"""Prefix of the reference's tensor names, which would otherwise equal the model's."""


def save(
    folder: Path,
    layout: Layout,
    optimizer: Optimizer,
    reference: ModelChunks | None = None,
    coefficients: Coefficients | None = None,
) -> None:
    """Write weights, optimizer state and reference to a folder; every rank must call it.

    The checkpoint is complete when all ranks have returned.

    Raises:
        OSError: writing failed; errno is ENOSPC if the disk is full.
    """
    write = shard_files.writer(_sharded(optimizer, reference, is_loading=False), distributed.get_rank())
    write(_prepare(folder, layout, reference, coefficients))


def begin_save(
    folder: Path,
    layout: Layout,
    optimizer: Optimizer,
    reference: ModelChunks | None = None,
    coefficients: Coefficients | None = None,
) -> Callable[[], None]:
    """Copy the state and write it in a background thread; every rank must call it.

    Returns:
        Function that waits for this rank's files. The checkpoint is complete when it has returned on all ranks.

    Raises:
        OSError: as in `save`; also raised by the returned function.
    """
    write = shard_files.writer(_sharded(optimizer, reference, is_loading=False), distributed.get_rank())
    return run_in_background(partial(write, _prepare(folder, layout, reference, coefficients)))


def _prepare(folder: Path, layout: Layout, reference: ModelChunks | None, coefficients: Coefficients | None) -> Path:
    state = folder / STATE
    if distributed.get_rank() == 0:
        shutil.rmtree(state, ignore_errors=True)
        state.mkdir(parents=True)
        metadata = {
            "engine": "megatron",
            "layout": asdict(layout),
            "reference": reference is not None,
            "coefficients": None if coefficients is None else asdict(coefficients),
        }
        (folder / weights.ENGINE).write_text(json.dumps(metadata))
    distributed.barrier()
    return state


def has_reference(folder: Path) -> bool:
    """Whether a checkpoint contains the reference model of the KL penalty."""
    return bool(_metadata(folder)["reference"])


def coefficients_of(folder: Path) -> Coefficients:
    """Coefficients of the step after a checkpoint of a trainer."""
    return Coefficients(**_metadata(folder)["coefficients"])


def load(folder: Path, layout: Layout, optimizer: Optimizer, reference: ModelChunks | None = None) -> None:
    """Load what `save` wrote, with any layout; every rank must call it.

    Raises:
        ConfigError: this layout cannot load the checkpoint.
        ValueError: the checkpoint lacks a part of this model.
    """
    written = int(_metadata(folder)["layout"]["expert"])
    if (written > 1) != (layout.expert > 1):
        msg = (
            f"checkpoint {folder} was written with expert_parallel = {written} and cannot be read with "
            f"{layout.expert}: only with expert_parallel > 1 the optimizer state of the experts is separate; "
            f"set expert_parallel = {written}"
        )
        raise ConfigError(msg)
    state = shard_files.read(_sharded(optimizer, reference, is_loading=True), folder / STATE)
    for number, model in enumerate(optimizer.models):
        model.module.load_state_dict(state[f"model{number}"])
    for number, model in enumerate(reference.wrapped if reference is not None else []):
        model.load_state_dict({k.removeprefix(REFERENCE): v for k, v in state[f"reference{number}"].items()})
    optimizer.inner.load_state_dict(state["optimizer"])


def _metadata(folder: Path) -> Any:
    return json.loads((folder / weights.ENGINE).read_text())


def _sharded(optimizer: Optimizer, reference: ModelChunks | None, *, is_loading: bool) -> dict[str, Any]:
    """Tensors of this rank with their positions in the whole model."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    models = {
        f"model{number}": model.module.sharded_state_dict(metadata=metadata)
        for number, model in enumerate(optimizer.models)
    }
    state = optimizer.inner.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
    frozen = {
        f"reference{number}": model.sharded_state_dict(prefix=REFERENCE, metadata=metadata)
        for number, model in enumerate(reference.wrapped if reference is not None else [])
    }
    return models | frozen | {"optimizer": state}
