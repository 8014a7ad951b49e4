"""What a machine has and does: load, memory, disk, and use of its GPUs."""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Self

from relax_actors.devices.inventory import Gpu, Inventory, driver
from relax_actors.errors import ConfigError

READ_SECONDS = 2.0
STALE_SECONDS = 15.0
"""Age from which figures are left out: a driver or a disk that hangs answers no more."""
MAX_GPUS = 64
CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Folder of a container's control group, and its files with the limit of memory and with what is used, page cache
included."""
_MAX_NUMBER = 1e15


class Memory(NamedTuple):
    """Memory that this process may use, in bytes: of the machine, or of its control group; 0 if unknown."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class GpuUse:
    """A GPU at one moment; None for what the driver does not report.

    Attributes:
        number: as CUDA counts.
        name: product name.
        busy: share of the last moments in which it computed, 0 to 1.
        used_mib: memory in use by all processes.
        memory_mib: its memory.
        celsius: its temperature.
        watts: power that it draws.
    """

    number: int
    name: str
    busy: float | None = None
    used_mib: float | None = None
    memory_mib: float | None = None
    celsius: float | None = None
    watts: float | None = None

    @classmethod
    def of(cls, value: Any) -> Self | None:
        """Return a GPU from untrusted plain data; None for anything else."""
        if not isinstance(value, Mapping) or not isinstance(value.get("number"), int):
            return None
        figures = {name: _figure(value.get(name)) for name in ("busy", "used_mib", "memory_mib", "celsius", "watts")}
        return cls(int(_figure(value["number"]) or 0), str(value.get("name", ""))[:80], **figures)

    def __str__(self) -> str:
        parts = [
            "" if self.busy is None else f"busy {self.busy:.0%}",
            "" if self.used_mib is None else f"{_gib(self.used_mib)} of {_gib(self.memory_mib)} GiB in use",
            "" if self.celsius is None else f"{self.celsius:.0f} °C",
            "" if self.watts is None else f"{self.watts:.0f} W",
        ]
        return f"GPU {self.number}, {self.name}: " + (", ".join(filter(None, parts)) or "no figures from its driver")


@dataclass(frozen=True, slots=True)
class MachineUse:
    """A machine at one moment; None for what is unknown.

    Attributes:
        cores: CPU cores.
        load: processes that ran or waited for a core, mean of the last minute.
        memory_mib: memory of the machine, or of its control group.
        memory_free_mib: memory that is free, or would be without the page cache.
        disk_free_mib: room on the disk of the run's folder.
        gpus: GPUs that the node may use.
    """

    cores: float | None = None
    load: float | None = None
    memory_mib: float | None = None
    memory_free_mib: float | None = None
    disk_free_mib: float | None = None
    gpus: list[GpuUse] = field(default_factory=list)

    @classmethod
    def of(cls, value: Any) -> Self | None:
        """Return a machine from untrusted plain data; None for anything else."""
        if not isinstance(value, Mapping) or not value:
            return None
        names = ("cores", "load", "memory_mib", "memory_free_mib", "disk_free_mib")
        gpus = value.get("gpus")
        known = map(GpuUse.of, gpus[:MAX_GPUS] if isinstance(gpus, list) else ())
        return cls(**{name: _figure(value.get(name)) for name in names}, gpus=[gpu for gpu in known if gpu is not None])

    def plain(self) -> dict[str, Any]:
        """Return it as plain data, as in the lease of a node."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return it as text: a line for the machine, and one for each GPU."""
        parts = [
            "" if self.load is None else f"load {self.load:.1f} on {self.cores or 0:.0f} cores",
            "" if self.memory_free_mib is None else f"{_gib(self.memory_free_mib)} of {_gib(self.memory_mib)} GiB free",
            "" if self.disk_free_mib is None else f"{_gib(self.disk_free_mib)} GiB of disk free",
        ]
        return ["machine: " + ", ".join(filter(None, parts)), *map(str, self.gpus)]

    def figures(self) -> dict[str, float]:
        """Return its figures for charts; of several GPUs the mean share, the least free memory, the highest heat."""
        found: dict[str, float | None] = {
            "load": self.load,
            "memory_free_mib": self.memory_free_mib,
            "disk_free_mib": self.disk_free_mib,
        }
        busy = [gpu.busy for gpu in self.gpus if gpu.busy is not None]
        pairs = ((gpu.memory_mib, gpu.used_mib) for gpu in self.gpus)
        found |= {
            "gpu_busy": round(sum(busy) / len(busy), 3) if busy else None,
            "gpu_memory_free_mib": min((a - b for a, b in pairs if a is not None and b is not None), default=None),
            "gpu_celsius": max((gpu.celsius for gpu in self.gpus if gpu.celsius is not None), default=None),
            "gpu_watts": round(sum(gpu.watts or 0.0 for gpu in self.gpus)) or None,
        }
        return {name: value for name, value in found.items() if value is not None}


class MachineWatch(threading.Thread):
    """Reads what a machine does, in a thread of its own: a driver or a disk that hangs must not stop its caller.

    Args:
        folder: a folder on the disk to look at.
        inventory: GPUs to look at; simulated ones have no figures.
    """

    def __init__(self, folder: Path, inventory: Inventory) -> None:
        super().__init__(name="machine", daemon=True)
        self._folder = folder
        self._gpus = [gpu for gpu in inventory.gpus if not gpu.is_simulated]
        self._latest: tuple[float, MachineUse] | None = None

    def run(self) -> None:
        """Read until the process ends."""
        if self._gpus:
            with suppress(ConfigError), driver() as nvml:  # a driver that does not answer hides its GPUs alone
                self._read_on(nvml)
        self._read_on(None)

    def _read_on(self, nvml: ModuleType | None) -> None:
        while True:
            self._latest = time.monotonic(), read_machine(self._folder, self._gpus, nvml)
            time.sleep(READ_SECONDS)

    def latest(self) -> MachineUse | None:
        """Return what was read last; None before the first time, and if that is too long ago."""
        latest = self._latest
        return None if latest is None or time.monotonic() - latest[0] > STALE_SECONDS else latest[1]


def read_machine(folder: Path, gpus: Iterable[Gpu] = (), nvml: ModuleType | None = None) -> MachineUse:
    """Return what this machine does now: `folder` is on the disk to look at, `nvml` the open library of `driver`."""
    memory = memory_of_machine()
    disk: int | None = None
    with suppress(OSError):
        disk = shutil.disk_usage(folder).free >> 20
    return MachineUse(
        cores=os.cpu_count(),
        load=round(os.getloadavg()[0], 2),
        memory_mib=memory.total >> 20 or None,
        memory_free_mib=memory.free >> 20 if memory.total else None,
        disk_free_mib=disk,
        gpus=[] if nvml is None else [_use(gpu, nvml) for gpu in gpus],
    )


def memory_of_machine(groups: Iterable[tuple[Path, str, str]] = CONTROL_GROUPS) -> Memory:
    """Return the memory that this process may use; `groups` are as `CONTROL_GROUPS`."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return Memory(0, 0)
    known = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    total, free = known.get("MemTotal", 0), known.get("MemAvailable", 0)
    for group, limit, used in groups:
        with suppress(OSError, ValueError):  # there is none, or its text is "max"
            most = int((group / limit).read_text())
            if most < total:
                total, free = most, min(free, most)
                counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                cache = int(counts.get("inactive_file", 0)) + int(counts.get("active_file", 0))
                free = max(0, min(free, most - int((group / used).read_text()) + cache))
    return Memory(total, free)


def _use(gpu: Gpu, nvml: ModuleType) -> GpuUse:
    """Return what a GPU does; some drivers and virtual GPUs report a part of it."""
    found: dict[str, float] = {}
    with suppress(nvml.NVMLError, nvml.NVMLLibraryMismatchError):
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        with suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            found |= {"used_mib": int(memory.used) >> 20, "memory_mib": int(memory.total) >> 20}
        with suppress(nvml.NVMLError):
            found["busy"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        with suppress(nvml.NVMLError):
            found["celsius"] = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        with suppress(nvml.NVMLError):
            found["watts"] = round(nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
    return GpuUse(gpu.number, gpu.name, **found)


def _gib(mib: float | None) -> str:
    return "?" if mib is None else f"{mib / 1024:.1f}"


def _figure(value: Any) -> float | None:
    """Return a field as a number; None if it is none, or absurd."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) and 0 <= value < _MAX_NUMBER else None
