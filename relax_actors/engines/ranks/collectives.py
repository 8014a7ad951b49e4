"""Network, GPU and process groups of a rank, and messages among ranks."""

from __future__ import annotations

import os
from ipaddress import IPv4Address
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch._C._distributed_c10d import Store

from broker.routes import interface_of
from relax_actors.engines.ranks import wire
from relax_actors.errors import ConfigError

_gloo_group: Any = None


def use_network(address: str) -> None:
    """Choose the network of this process, before `join`, by its own address; raises ConfigError if it has none such."""
    is_loopback, interface = IPv4Address(address).is_loopback, interface_of(address)
    if not interface and not is_loopback:
        msg = (
            f"no network interface has the address {address}, by which this machine reaches the other ranks, as its "
            "primary one; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to its interface"
        )
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            raise ConfigError(msg)
    elif interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if not is_loopback:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def use_gpu(number: int) -> None:
    """Choose the GPU of this process, among those that it sees; raises ConfigError if there are fewer."""
    if torch.cuda.device_count() <= number:
        msg = f"rank needs GPU {number}, and this process sees {torch.cuda.device_count()} GPUs; lower the ranks"
        raise ConfigError(msg)
    torch.cuda.set_device(number)


def join(rank: int, ranks: int, store: Store, device: torch.device) -> None:
    """Join the other ranks, unless this process has done so; messages among them use gloo on every device.

    `store` is the rendezvous of the ranks.

    Raises:
        ConfigError: this process is one of another number of ranks.
    """
    global _gloo_group  # noqa: PLW0603 torch's default process group is global as well
    if distributed.is_initialized():
        if (others := distributed.get_world_size()) != ranks:
            msg = f"this process is one of {others} ranks already; start {ranks} in separate processes"
            raise ConfigError(msg)
        return
    # By default gloo takes the address of the host name, which may not resolve to a reachable one.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend, own = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=ranks, device_id=own)
    _gloo_group = distributed.new_group(backend="gloo")


def all_gather_messages(message: Any) -> list[Any]:
    """Messages of all ranks, by rank; plain data and arrays, over gloo on GPUs as well.

    Collective: every rank must call it.
    """
    data = np.frombuffer(wire.encode(message), np.uint8)
    ranks = distributed.get_world_size(_gloo_group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    distributed.all_gather(sizes, torch.tensor([len(data)]), group=_gloo_group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = torch.from_numpy(data.copy())
    received = [torch.empty(longest, dtype=torch.uint8) for _ in range(ranks)]
    distributed.all_gather(received, padded, group=_gloo_group)
    return [wire.decode(data[: int(size)].numpy().tobytes()) for data, size in zip(received, sizes, strict=True)]
