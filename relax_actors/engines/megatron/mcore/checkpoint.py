"""Checkpoints by dist_checkpointing: each rank writes its shards, any layout loads them."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException

from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore.model_chunks import ModelChunks
from relax_actors.engines.megatron.mcore.optimizer import Optimizer
from relax_actors.engines.torch.background import run_in_background
from relax_actors.errors import ConfigError

STATE, METADATA = "state", "engine.json"
REFERENCE = "reference."
"""Prefix of the reference's tensor names, which would otherwise equal the model's."""


def save(folder: Path, layout: Layout, optimizer: Optimizer, reference: ModelChunks | None) -> None:
    """Write weights, optimizer state and reference to a folder; every rank must call it.

    Raises:
        OSError: writing failed; errno is ENOSPC if the disk is full.
    """
    state = _prepare(folder, layout, reference)
    with _as_os_error(state):
        dist_checkpointing.save(_sharded(optimizer, reference, is_loading=False), str(state))


def begin_save(folder: Path, layout: Layout, optimizer: Optimizer, reference: ModelChunks | None) -> Callable[[], None]:
    """Copy the state and write it in a background thread; every rank must call it.

    Returns:
        Collective function that waits for the writer and completes the checkpoint.

    Raises:
        OSError: as in `save`; also raised by the returned function.
    """
    state = _prepare(folder, layout, reference)
    with _as_os_error(state):
        request = dist_checkpointing.save(
            _sharded(optimizer, reference, is_loading=False), str(state), async_sharded_save=True
        )
        # As in AsyncRequest.execute_sync, but with copied tensors: the next step changes the originals.
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            arguments[1] = [
                (file, key, (parts, [(item, tensor.clone()) for item, tensor in tensors]))
                for file, key, (parts, tensors) in request.preload_fn()
            ]
    write = request.async_fn or (lambda *_: None)
    written = run_in_background(partial(write, *arguments, **request.async_fn_kwargs))

    def finish() -> None:
        with _as_os_error(state):
            written()
            distributed.barrier()
            for finalize in request.finalize_fns:
                finalize()

    return finish


def _prepare(folder: Path, layout: Layout, reference: ModelChunks | None) -> Path:
    state = folder / STATE
    if distributed.get_rank() == 0:
        shutil.rmtree(state, ignore_errors=True)
        state.mkdir(parents=True)
        metadata = {"engine": "megatron", "layout": asdict(layout), "reference": reference is not None}
        (folder / METADATA).write_text(json.dumps(metadata))
    distributed.barrier()
    return state


@contextmanager
def _as_os_error(state: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's CheckpointException is not an Exception
        full = f"[Errno {errno.ENOSPC}]" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(state)) from error


def has_reference(folder: Path) -> bool:
    """Whether a checkpoint contains the reference model of the KL penalty."""
    return bool(_metadata(folder)["reference"])


def load(folder: Path, layout: Layout, optimizer: Optimizer, reference: ModelChunks | None) -> None:
    """Load what `save` wrote, with any layout; every rank must call it.

    Raises:
        ConfigError: this layout cannot load the checkpoint.
        RuntimeError: the checkpoint cannot be read.
    """
    written = int(_metadata(folder)["layout"]["expert"])
    if (written > 1) != (layout.expert > 1):
        msg = (
            f"checkpoint {folder} was written with expert_parallel = {written} and cannot be read with "
            f"{layout.expert}: only with expert_parallel > 1 the optimizer state of the experts is separate; "
            f"set expert_parallel = {written}"
        )
        raise ConfigError(msg)
    try:
        state = dist_checkpointing.load(_sharded(optimizer, reference, is_loading=True), str(folder / STATE))
    except (CheckpointingException, CheckpointException) as error:
        raise RuntimeError(str(error)) from error
    for number, model in enumerate(optimizer.models):
        model.module.load_state_dict(state[f"model{number}"])
    for number, model in enumerate(reference.wrapped if reference is not None else []):
        model.load_state_dict({k.removeprefix(REFERENCE): v for k, v in state[f"reference{number}"].items()})
    optimizer.inner.load_state_dict(state["optimizer"])


def _metadata(folder: Path) -> Any:
    return json.loads((folder / METADATA).read_text())


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
