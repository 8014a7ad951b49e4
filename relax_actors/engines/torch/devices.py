"""Where a torch engine computes: its device, and the ranks that it shares models with."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import HashStore, Store

from relax_actors.config.training import TorchSection
from relax_actors.devices.binding import own_device
from relax_actors.engines.torch.sharding import Whole


def device_of(name: str) -> torch.device:
    """Return the torch device of a setting; "auto" is CUDA where available, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(own_device(name))


def describe_device(name: str) -> str:
    """Return what a setting means on this machine: "cpu", or "cuda" with the name of the GPU."""
    device = device_of(name)
    return device.type if device.type != "cuda" else f"cuda ({torch.cuda.get_device_name(device)})"


def sharding_of(
    section: TorchSection, device: str, dtype: torch.dtype, rank: int, store: Store | None, head_dtype: torch.dtype
) -> Whole:
    """Return how a rank shares its models: it holds them whole if it is alone, unless they are offloaded.

    Args:
        section: settings of the ranks.
        device: torch device, or "auto".
        dtype: dtype of the computation.
        rank: number of this process.
        store: rendezvous of the ranks; not needed with one rank.
        head_dtype: dtype of the computation of logits.
    """
    own = device_of(device)
    if section.ranks == 1 and not section.offload:
        return Whole(own)
    from relax_actors.engines.torch.fully_sharded import FullySharded  # noqa: PLC0415 imports much of torch

    ranks = section.ranks
    return FullySharded(rank, ranks, store or HashStore(), own, dtype, head_dtype, offload=section.offload)
