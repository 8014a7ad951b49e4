"""GPUs that a supervisor leased to a process, as environment variables."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress

from relax_actors.devices.inventory import VISIBLE, Gpu

LEASED = "RELAX_GPUS"
"""Environment variable with the numbers of the leased GPUs on their node; empty for a process that has none."""
CORES = "RELAX_CORES"
"""Environment variable with the numbers of the CPU cores near the leased GPUs."""


def lease_environment(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the environment of a process that sees only these GPUs."""
    numbers = ",".join(str(gpu.number) for gpu in gpus)
    cores = {core for gpu in gpus for core in gpu.cores}
    near = {CORES: ",".join(map(str, sorted(cores)))} if cores else {}
    visible = ",".join(str(gpu.number) for gpu in gpus if not gpu.is_simulated)
    return {VISIBLE: visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", LEASED: numbers, **near}


def bind_to_cores() -> None:
    """Run this process on the CPU cores near its GPUs, if they were named."""
    near = {int(core) for core in os.environ.get(CORES, "").split(",") if core}
    if usable := near & os.sched_getaffinity(0):
        with suppress(OSError):  # a container may forbid it
            os.sched_setaffinity(0, usable)


def leased_devices() -> tuple[str, ...]:
    """Return names of this process's GPUs that are equal in all processes."""
    return tuple(f"{platform.node()}-gpu{number}" for number in sorted(_leased()))


def _leased() -> list[int]:
    return [int(number) for number in os.environ.get(LEASED, "").split(",") if number]


def own_device(name: str) -> str:
    """Return the torch device of a setting as this process counts.

    GPU "cuda:3" of the node is the first that it sees, and a simulated GPU is the CPU.
    """
    if not name.startswith("cuda") or not os.environ.get(LEASED):
        return name
    return "cuda" if os.environ.get(VISIBLE) else "cpu"
