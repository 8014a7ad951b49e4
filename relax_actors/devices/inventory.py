"""GPUs of a machine: read from NVIDIA's driver without torch, or simulated.

A GPU has the number that CUDA gives it in the order of the PCI bus, which is that of the driver.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from relax_actors.counted import counted
from relax_actors.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER_FILES = ("/proc/driver/nvidia/gpus", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Files of the drivers of NVIDIA, of NVIDIA under WSL, and of AMD."""
NO_GPUS = "none"
_SIMULATED = re.compile(r"(\d{1,4})(?:x(\d{1,6})GiB)?")
_WORD_BITS = 64
DEFAULT_GIB = 80
SIMULATED = " (--simulate-gpus)"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        number: as CUDA counts.
        name: product name.
        memory: bytes.
        uuid: identifies it across processes and containers; empty if simulated.
        cores: numbers of the CPU cores near it; empty if unknown.
    """

    number: int
    name: str
    memory: int
    uuid: str = ""
    cores: tuple[int, ...] = ()

    @property
    def is_simulated(self) -> bool:
        """Whether it exists on paper only: actors compute on the CPU."""
        return not self.uuid

    def users(self) -> tuple[int, ...]:
        """Ids of the processes that hold memory of it now; none of a simulated one."""
        if not self.uuid:
            return ()
        with driver() as nvml:
            if nvml is None:
                return ()
            with suppress(nvml.NVMLError, nvml.NVMLLibraryMismatchError):
                handle = nvml.nvmlDeviceGetHandleByUUID(self.uuid)
                return tuple(process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return ()


@dataclass(frozen=True, slots=True)
class Inventory:
    """GPUs that a node may use.

    Attributes:
        gpus: by number.
        limit: what leaves out other GPUs of the machine, for messages; empty if nothing does.
        is_complete: whether there are no others, such as those of another vendor, which are left to torch.
    """

    gpus: tuple[Gpu, ...] = ()
    limit: str = ""
    is_complete: bool = True

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the GPUs."""
        return tuple(gpu.number for gpu in self.gpus)

    @property
    def is_simulated(self) -> bool:
        """Whether the GPUs exist on paper only."""
        return bool(self.gpus) and self.gpus[0].is_simulated

    def __str__(self) -> str:
        if not self.gpus:
            return f"no GPU{self.limit}"
        kinds = dict.fromkeys(f"{gpu.name}, {gpu.memory / 2**30:.0f} GiB" for gpu in self.gpus)
        return f"{counted(len(self.gpus), 'GPU')} ({'; '.join(kinds)}){self.limit}"


NO_GPU = Inventory()


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """GPUs that a node is asked to use.

    Attributes:
        gpus: numbers of GPUs of this machine, such as "0,1", or "none"; empty for all that CUDA_VISIBLE_DEVICES leaves.
        simulated: number and memory of GPUs to pretend to have, such as "8x80GiB"; empty for those of the machine.
    """

    gpus: str = ""
    simulated: str = ""

    def inventory(self) -> Inventory:
        """Return the GPUs; raises ConfigError for a wrong text or missing GPU."""
        if self.gpus and self.simulated:
            msg = f"--gpus {self.gpus!r} and --simulate-gpus {self.simulated!r} exclude each other; give one"
            raise ConfigError(msg)
        if self.simulated:
            return simulate(self.simulated)
        if self.gpus == NO_GPUS:
            return Inventory(limit=f" (--gpus {NO_GPUS})")
        return choose(machine_inventory(), self.gpus) if self.gpus else machine_inventory()


NO_REQUEST = GpuRequest()


def choose(machine: Inventory, gpus: str) -> Inventory:
    """Return GPUs by numbers such as "0,1"; raises ConfigError."""
    parts = gpus.split(",")
    if not all(part.isascii() and part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        msg = f"--gpus {gpus!r} is not a list of GPUs; write numbers such as 0,1,2, or {NO_GPUS}"
        raise ConfigError(msg)
    by_number = {str(gpu.number): gpu for gpu in machine.gpus}
    if absent := [part for part in parts if part not in by_number]:
        numbers = f", numbered {', '.join(by_number)}" if by_number else ""
        msg = f"--gpus {gpus!r}: this machine has no GPU {absent[0]}; it has {machine}" + numbers
        raise ConfigError(msg)
    return Inventory(tuple(by_number[part] for part in parts), f" (--gpus {gpus})")


def simulate(text: str) -> Inventory:
    """Return GPUs on paper, such as "8x80GiB"; raises ConfigError."""
    match = _SIMULATED.fullmatch(text)
    if match is None:
        msg = f"--simulate-gpus {text!r} is not a number of GPUs; write 8, or 8x80GiB"
        raise ConfigError(msg)
    memory = int(match[2] or DEFAULT_GIB) << 30
    return Inventory(tuple(Gpu(number, "simulated GPU", memory) for number in range(int(match[1]))), SIMULATED)


@cache
def machine_inventory() -> Inventory:
    """Return this machine's GPUs within `CUDA_VISIBLE_DEVICES`.

    Raises:
        ConfigError: the driver is there and does not answer, or `CUDA_VISIBLE_DEVICES` names no GPU of it.
    """
    with driver() as nvml:
        if nvml is None:
            return Inventory(is_complete=not any(Path(path).exists() for path in DRIVER_FILES))
        gpus = tuple(gpu for number in range(nvml.nvmlDeviceGetCount()) if (gpu := _read(nvml, number)) is not None)
    if torch_version().endswith("+cpu"):
        return Inventory(limit=" (torch is built for CPUs)")
    visible = os.environ.get(VISIBLE)
    return Inventory(gpus) if visible is None else visible_gpus(gpus, visible)


def visible_gpus(gpus: tuple[Gpu, ...], visible: str) -> Inventory:
    """Return the GPUs of a `CUDA_VISIBLE_DEVICES`: numbers, or starts of UUIDs."""
    limit = f" ({VISIBLE} = {visible!r})"
    chosen = []
    for part in (part.strip() for part in visible.split(",")):
        if part in ("", "-1", "NoDevFiles"):
            break  # CUDA sees none behind it
        if part.startswith("MIG-"):
            msg = (
                f"{VISIBLE} = {visible!r}: slices of a GPU (MIG) cannot be leased; name whole GPUs, or set --gpus none"
            )
            raise ConfigError(msg)
        match = [gpu for gpu in gpus if str(gpu.number) == part or (gpu.uuid and gpu.uuid.startswith(part))]
        if len(match) != 1:
            msg = (
                f"{VISIBLE} = {visible!r}: {part!r} is no GPU of this machine, which has {Inventory(gpus)}; correct it"
            )
            raise ConfigError(msg)
        if match[0] in chosen:
            break  # as above
        chosen += match
    return Inventory(tuple(chosen), limit)


def torch_version() -> str:
    """Return the version of torch, whose import takes seconds; empty if it is not installed."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _read(nvml: ModuleType, number: int) -> Gpu | None:
    """Return a GPU, or None if lost; memory and cores may be unknown."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        gpu = Gpu(number, str(nvml.nvmlDeviceGetName(handle)), 0, str(nvml.nvmlDeviceGetUUID(handle)))
    except nvml.NVMLError:
        return None
    with suppress(nvml.NVMLError):
        gpu = replace(gpu, memory=int(nvml.nvmlDeviceGetMemoryInfo(handle).total))
    with suppress(nvml.NVMLError):
        words = nvml.nvmlDeviceGetCpuAffinity(handle, math.ceil((os.cpu_count() or 1) / _WORD_BITS))
        gpu = replace(gpu, cores=tuple(_bits(words)))
    return gpu


def _bits(words: Any) -> Iterator[int]:
    for n, word in enumerate(words):
        yield from (n * _WORD_BITS + bit for bit in range(_WORD_BITS) if int(word) >> bit & 1)


@contextmanager
def driver() -> Iterator[ModuleType | None]:
    """Open NVIDIA's management library, or None; raises ConfigError."""
    import pynvml  # noqa: PLC0415 most commands need no GPU

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield None
        return
    except pynvml.NVMLError as error:
        msg = f"NVIDIA's driver does not answer: {error}; run nvidia-smi to see why"
        raise ConfigError(msg) from error
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
