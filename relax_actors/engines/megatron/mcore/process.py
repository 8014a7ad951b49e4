"""This process as one rank: its device and its place in the groups of megatron-core."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import distributed
from torch._C._distributed_c10d import Store

from relax_actors.engines.megatron import wire
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore import ON_CPU
from relax_actors.errors import ConfigError

_layout: Layout | None = None
_talk: Any = None


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cpu") if ON_CPU else torch.device("cuda", torch.cuda.current_device())


def told_by_all(message: Any) -> list[Any]:
    """What each rank says, by number: plain data and arrays, over the hosts' network, whatever tensors go over.

    All ranks call it.
    """
    data = np.frombuffer(wire.encode(message), np.uint8)
    ranks = distributed.get_world_size(_talk)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    distributed.all_gather(sizes, torch.tensor([len(data)]), group=_talk)
    longest = max(int(size) for size in sizes)
    ours = torch.zeros(longest, dtype=torch.uint8)
    ours[: len(data)] = torch.from_numpy(data.copy())
    found = [torch.empty(longest, dtype=torch.uint8) for _ in range(ranks)]
    distributed.all_gather(found, ours, group=_talk)
    return [wire.decode(one[: int(size)].numpy().tobytes()) for one, size in zip(found, sizes, strict=True)]


def check_device(wanted: str, setting: str) -> None:
    """Refuse a device that megatron-core cannot take: where there is CUDA it computes on CUDA.

    Args:
        wanted: the name of a device.
        setting: that says so.

    Raises:
        ConfigError: it is another than what there is.
    """
    if wanted == "cpu" and not ON_CPU:
        msg = f'{setting} = "cpu", but Megatron-Core takes CUDA where it is; hide it: CUDA_VISIBLE_DEVICES=""'
        raise ConfigError(msg)
    if wanted not in ("auto", "cpu") and ON_CPU:
        msg = f'{setting} = {wanted!r}, but there is no CUDA here; set it to "auto"'
        raise ConfigError(msg)


def begin(layout: Layout, rank: int, store: Store) -> None:
    """Join the ranks and lay out their groups; once a process, for megatron-core's groups belong to the process.

    Args:
        layout: of all ranks.
        rank: of this process, and number of its GPU.
        store: through which the ranks find each other.

    Raises:
        ConfigError: the process has another layout already, or there are fewer GPUs than ranks.
    """
    global _layout, _talk  # noqa: PLW0603 parallel_state is the process's own, too
    if _layout is not None:
        if _layout != layout:
            msg = f"this process has the parallel layout {_layout} already, {layout} needs processes of its own"
            raise ConfigError(msg)
        return
    if not ON_CPU:
        if torch.cuda.device_count() < layout.ranks:
            msg = f"trainer.megatron.ranks is {layout.ranks}, this machine has {torch.cuda.device_count()} GPUs"
            raise ConfigError(msg)
        torch.cuda.set_device(rank)
    # The ranks are processes of one machine, whose name need not lead anywhere.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo" if ON_CPU else "nccl"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=layout.ranks)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    # Nothing is drawn in training; but layers ask for named generators when they are built.
    model_parallel_cuda_manual_seed(1)
    _talk = distributed.new_group(backend="gloo")
    _layout = layout
