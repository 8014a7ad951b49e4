"""Checks of the machine: what torch, NVIDIA's driver and the inventory of a node say of its GPUs."""

from __future__ import annotations

import os
import platform

import torch

from gpu_checks.frame import Failed, Figures, Place, check
from relax_actors.devices.inventory import machine_inventory
from relax_actors.supervision.gpu_leases import taken_gpus

MEMORY_TOLERANCE = 0.05


@check("inventory", seconds=60)
def inventory(place: Place) -> Figures:
    """The inventory of a node says what torch says, and who uses a GPU."""
    found = machine_inventory()
    figures: Figures = {
        "inventory": str(found),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count() or 0,
    }
    if not place.on_gpu:
        if torch.cuda.is_available() != bool(found.gpus):
            msg = f"torch sees CUDA: {torch.cuda.is_available()}; the inventory: {found}"
            raise Failed(msg)
        return figures
    if len(found.gpus) != torch.cuda.device_count():
        msg = f"the inventory has {found}, torch {torch.cuda.device_count()} GPUs"
        raise Failed(msg)
    figures["near_cores"] = len(found.gpus[0].cores)
    for gpu in found.gpus:
        known = torch.cuda.get_device_properties(gpu.number)
        if known.name != gpu.name or abs(known.total_memory / gpu.memory - 1) > MEMORY_TOLERANCE:
            msg = f"GPU {gpu.number}: {gpu.name}, {gpu.memory} bytes; torch: {known.name}, {known.total_memory} bytes"
            raise Failed(msg)
    before = taken_gpus(found)
    held = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    figures |= {
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "in_use_before": ", ".join(before.values()) or "no",
        "in_use_by_this_process": ", ".join(taken_gpus(found).values()) or "not seen",
    }
    del held
    return figures
