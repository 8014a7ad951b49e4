"""Checkpoints by megatron-core's dist_checkpointing: each rank writes its part, any layout reads them."""

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
from relax_actors.engines.megatron.mcore.optimizer import Optimizer
from relax_actors.engines.megatron.mcore.transformer import Chunks
from relax_actors.engines.torch.background import meanwhile
from relax_actors.errors import ConfigError

STATE, ABOUT = "state", "engine.json"
REFERENCE = "reference."
"""Before the names of the reference's tensors, which are the model's own."""


def save(folder: Path, layout: Layout, optimizer: Optimizer, reference: Chunks | None) -> None:
    """Write weights, optimizer and reference below a folder; all ranks call it.

    Raises:
        OSError: it cannot be written; with errno ENOSPC if there is no space.
    """
    state = _prepared(folder, layout, reference)
    with _told(state):
        dist_checkpointing.save(_sharded(optimizer, reference, is_loading=False), str(state))


def begin(folder: Path, layout: Layout, optimizer: Optimizer, reference: Chunks | None) -> Callable[[], None]:
    """As `save`, from a copy, by a thread of its own; what is given waits for that. All ranks call both.

    Raises:
        OSError: as `save`; so does what is given.
    """
    state = _prepared(folder, layout, reference)
    with _told(state):
        request = dist_checkpointing.save(
            _sharded(optimizer, reference, is_loading=False), str(state), async_sharded_save=True
        )
        # As AsyncRequest.execute_sync, whose tensors may be those that the next step changes.
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            arguments[1] = [
                (file, key, (parts, [(item, tensor.clone()) for item, tensor in tensors]))
                for file, key, (parts, tensors) in request.preload_fn()
            ]
    write = request.async_fn or (lambda *_: None)
    written = meanwhile(partial(write, *arguments, **request.async_fn_kwargs))

    def finish() -> None:
        with _told(state):
            written()
            distributed.barrier()
            for last in request.finalize_fns:
                last()

    return finish


def _prepared(folder: Path, layout: Layout, reference: Chunks | None) -> Path:
    state = folder / STATE
    if distributed.get_rank() == 0:
        shutil.rmtree(state, ignore_errors=True)
        state.mkdir(parents=True)
        about = {"engine": "megatron", "layout": asdict(layout), "reference": reference is not None}
        (folder / ABOUT).write_text(json.dumps(about))
    distributed.barrier()
    return state


@contextmanager
def _told(state: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        full = f"[Errno {errno.ENOSPC}]" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(state)) from error


def has_reference(folder: Path) -> bool:
    """Whether a checkpoint holds the reference of the KL."""
    return bool(_about(folder)["reference"])


def load(folder: Path, layout: Layout, optimizer: Optimizer, reference: Chunks | None) -> None:
    """Take what `save` wrote, with any layout; all ranks call it.

    Raises:
        ConfigError: it cannot be taken by this layout.
        RuntimeError: it cannot be read.
    """
    written = int(_about(folder)["layout"]["expert"])
    if (written > 1) != (layout.expert > 1):
        msg = (
            f"checkpoint {folder} was written with expert_parallel = {written} and cannot be read with "
            f"{layout.expert}: the optimizer keeps experts apart only where they are shared; go on with {written}"
        )
        raise ConfigError(msg)
    try:
        found = dist_checkpointing.load(_sharded(optimizer, reference, is_loading=True), str(folder / STATE))
    except (CheckpointingException, CheckpointException) as error:
        raise RuntimeError(str(error)) from error
    for number, model in enumerate(optimizer.models):
        model.module.load_state_dict(found[f"model{number}"])
    for number, model in enumerate(reference.wrapped if reference is not None else []):
        model.load_state_dict({k.removeprefix(REFERENCE): v for k, v in found[f"reference{number}"].items()})
    optimizer.inner.load_state_dict(found["optimizer"])


def _about(folder: Path) -> Any:
    return json.loads((folder / ABOUT).read_text())


def _sharded(optimizer: Optimizer, reference: Chunks | None, *, is_loading: bool) -> dict[str, Any]:
    """All tensors of this rank with their places in the whole."""
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
