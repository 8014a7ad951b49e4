"""Device and process groups of this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import distributed
from torch._C._distributed_c10d import Store

from relax_actors.devices.binding import own_device
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore import ON_CPU
from relax_actors.engines.ranks.collectives import all_gather_messages, join
from relax_actors.errors import ConfigError

_layout: Layout | None = None
_model_group: Any = None


def device() -> torch.device:
    """Device that this rank computes on."""
    return torch.device("cpu") if ON_CPU else torch.device("cuda", torch.cuda.current_device())


def reports_metrics() -> bool:
    """Whether this rank reports for all ranks that computed the same losses."""
    return bool(
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    )


@contextmanager
def plain_object_gathering() -> Iterator[None]:
    """Let megatron-core gather keys of parameter groups as plain data: torch's `all_gather_object` pickles them."""

    def all_gather_object(object_list: Any, obj: Any, group: Any = None) -> None:
        del group  # megatron-core gathers from all ranks
        object_list[:] = [_with_tuples(message) for message in all_gather_messages(obj)]

    original = distributed.all_gather_object
    distributed.all_gather_object = all_gather_object
    try:
        yield
    finally:
        distributed.all_gather_object = original


def _with_tuples(message: list[list[Any]]) -> list[tuple[Any, ...]]:
    """Restore the keys, tuples that a message turns into lists."""
    return [tuple(key) for key in message]


def choose_device(name: str, setting: str) -> None:
    """Refuse a device that megatron-core cannot use; it always uses CUDA if available, and there the current device.

    Args:
        name: torch device, or "auto".
        setting: configuration key that holds the name.

    Raises:
        ConfigError: the device does not match what is available.
    """
    name = own_device(name)
    if name == "cpu" and not ON_CPU:
        msg = f'{setting} = "cpu", but Megatron-Core uses CUDA where it is available; hide it: CUDA_VISIBLE_DEVICES=""'
        raise ConfigError(msg)
    if name not in ("auto", "cpu") and ON_CPU:
        msg = f'{setting} = {name!r}, but CUDA is not available; set it to "auto"'
        raise ConfigError(msg)
    if not ON_CPU and name != "auto" and (index := torch.device(name).index) is not None:
        torch.cuda.set_device(index)


def check_backend(layout: Layout) -> None:
    """Refuse a layout that ranks without GPUs cannot compute with.

    Raises:
        ConfigError: gloo lacks an operation that the layout needs.
    """
    if ON_CPU and layout.expert > 1 and layout.expert_tensor > 1:
        msg = (
            f"expert_parallel = {layout.expert} with expert_tensor_parallel = {layout.expert_tensor} needs GPUs: gloo "
            "does not gather unequal numbers of tokens; set expert_tensor_parallel = 1"
        )
        raise ConfigError(msg)


def model_group(layout: Layout) -> Any:
    """Return the group of the ranks that compute the same micro-batches: those of one data-parallel rank.

    Collective the first time.
    """
    global _model_group  # noqa: PLW0603 parallel_state's groups are global as well
    if _model_group is None:
        replicas = all_gather_messages(parallel_state.get_data_parallel_rank())
        for replica in range(layout.data):
            group = distributed.new_group([rank for rank, own in enumerate(replicas) if own == replica])
            if replica == parallel_state.get_data_parallel_rank():
                _model_group = group
    return _model_group


def initialise(layout: Layout, rank: int, store: Store) -> None:
    """Join the other ranks and create the process groups, which are global to the process.

    Args:
        layout: of all ranks.
        rank: number of this process.
        store: rendezvous of the ranks.

    Raises:
        ConfigError: this process already has another layout; or see `check_backend`.
    """
    global _layout  # noqa: PLW0603 megatron-core's parallel_state is global as well
    if _layout is not None:
        if _layout != layout:
            msg = f"this process already has the parallel layout {_layout}; start {layout} in separate processes"
            raise ConfigError(msg)
        return
    check_backend(layout)
    join(rank, layout.ranks, store, device())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    # Training draws no random numbers, but layers look up named generators when they are built.
    model_parallel_cuda_manual_seed(1)
    _layout = layout
