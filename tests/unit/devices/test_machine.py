"""What a machine does: read here, from a real GPU where there is one, and from untrusted data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.devices.inventory import Gpu, Inventory, driver, machine_inventory, simulate
from relax_actors.devices.machine import GpuUse, MachineUse, MachineWatch, memory_of_machine, read_machine
from tests.support.recorded_runs import recorded_machine
from tests.support.running import wait_until

GPUS = machine_inventory().gpus
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)
NAMES = ("cores", "load", "memory_mib", "memory_free_mib", "disk_free_mib")


def test_machine_of_this_process_is_read(tmp_path: Path) -> None:
    found = read_machine(tmp_path)
    assert found.cores == os.cpu_count()
    assert found.memory_free_mib is not None
    assert found.memory_mib is not None
    assert 0 < found.memory_free_mib <= found.memory_mib
    assert found.load is not None
    assert found.load >= 0
    assert found.disk_free_mib is not None
    assert MachineUse.of(json.loads(json.dumps(found.plain()))) == found
    assert found.figures().keys() == {"load", "memory_free_mib", "disk_free_mib"}
    assert read_machine(tmp_path / "absent").disk_free_mib is None


def test_watch_reads_in_a_thread_of_its_own_and_asks_no_driver_about_simulated_gpus(tmp_path: Path) -> None:
    watch = MachineWatch(tmp_path, simulate("2x40GiB"))
    assert watch.latest() is None
    watch.start()
    found = wait_until(watch.latest, "figures")
    assert (found.cores, found.gpus) == (os.cpu_count(), [])


@pytest.mark.skipif(bool(GPUS), reason="needs a machine without NVIDIA's driver")
def test_missing_driver_hides_its_gpus_alone(tmp_path: Path) -> None:
    watch = MachineWatch(tmp_path, Inventory((Gpu(0, "H100", 80 << 30, "GPU-a"),)))
    watch.start()
    found = wait_until(watch.latest, "figures")
    assert (found.cores, found.disk_free_mib is None, found.gpus) == (os.cpu_count(), False, [])


@pytest.mark.skipif(not GPUS, reason="needs an NVIDIA GPU and its driver")
def test_gpus_of_this_machine_are_read(tmp_path: Path) -> None:
    watch = MachineWatch(tmp_path, Inventory(GPUS))
    watch.start()
    found = wait_until(watch.latest, "figures").gpus
    assert [(gpu.number, gpu.name) for gpu in found] == [(gpu.number, gpu.name) for gpu in GPUS]
    for use, gpu in zip(found, GPUS, strict=True):
        assert use.memory_mib == pytest.approx(gpu.memory / 2**20, abs=1)
        assert use.used_mib is not None
        assert 0 <= use.used_mib <= use.memory_mib
        assert use.busy is None or 0 <= use.busy <= 1
        assert use.celsius is None or 0 < use.celsius < 120
    with driver() as nvml:
        lost = read_machine(tmp_path, [simulate("1").gpus[0]], nvml)
    assert lost.gpus == [GpuUse(0, "simulated GPU")]


def test_machine_with_a_gpu_that_computes_is_shown() -> None:
    found = recorded_machine()
    (gpu,) = found.gpus
    assert gpu.busy is not None
    assert gpu.busy > 0.5
    machine, line = found.lines()
    assert machine.startswith("machine: load ")
    assert line.startswith(f"GPU 0, {gpu.name}: busy {gpu.busy:.0%}, ")
    assert line.endswith(f" GiB in use, {gpu.celsius:.0f} °C, {gpu.watts:.0f} W")
    figures = found.figures()
    assert (figures["gpu_busy"], figures["gpu_celsius"], figures["gpu_watts"]) == (gpu.busy, gpu.celsius, gpu.watts)
    assert str(GpuUse(3, "GRID")) == "GPU 3, GRID: no figures from its driver"


def test_several_gpus_are_one_figure_for_charts() -> None:
    gpus = [
        GpuUse(0, "H100", busy=1.0, used_mib=70.0, memory_mib=80.0, celsius=60, watts=600),
        GpuUse(1, "H100", busy=0.5, used_mib=20.0, memory_mib=80.0, celsius=40, watts=200),
        GpuUse(2, "GRID"),
    ]
    figures = MachineUse(gpus=gpus).figures()
    assert figures == {"gpu_busy": 0.75, "gpu_memory_free_mib": 10.0, "gpu_celsius": 60, "gpu_watts": 800}


@given(st.fixed_dictionaries({}, optional=dict.fromkeys([*NAMES, "gpus"], JSON)) | JSON)
def test_whatever_anybody_writes_as_a_machine_can_be_shown(value: Any) -> None:
    found = MachineUse.of(value)
    if found is not None:
        json.dumps(found.plain(), allow_nan=False)
        assert len(found.lines()) == 1 + len(found.gpus)


def test_memory_of_a_container_is_that_of_its_control_group(tmp_path: Path) -> None:
    group = [(tmp_path, "memory.max", "memory.current")]
    whole = memory_of_machine(group)
    for text in ("max", str(whole.total * 2)):
        (tmp_path / "memory.max").write_text(text)
        assert memory_of_machine(group).total == whole.total
    (tmp_path / "memory.max").write_text(str(64 << 20))
    (tmp_path / "memory.current").write_text(str(60 << 20))
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {10 << 20}\nactive_file {8 << 20}\n")
    assert memory_of_machine(group) == (64 << 20, 22 << 20)
