"""Checks of this machine: devices, folders, ports and addresses that a configuration asks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from broker.address import Address
from broker.errors import BrokerError
from broker.permissions import OPERATOR
from broker.server import is_jetstream_ready, port_problem
from relax_actors.config import Config
from relax_actors.data.checked_run import CheckedRun
from relax_actors.engines.backends import footprints
from relax_actors.errors import ConfigError
from relax_actors.roles import replicas, spec_of
from relax_actors.runtime.run_folder import RunFolder

_DEVICE = re.compile(r"(auto|cpu|cuda|mps|xpu|hpu|npu)(?::(\d+))?")
GPU_FILES = ("/proc/driver/nvidia/gpus", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Files of the drivers of NVIDIA, of NVIDIA under WSL, and of AMD."""
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


def check_devices(run: CheckedRun) -> None:
    """Check that the devices of the roles that start on this machine exist.

    Raises:
        ConfigError: one line for each setting that names no device of this machine.
    """
    config, gpus = run.config, {role: footprint.gpus for role, footprint in footprints(run.config).items()}
    gpus |= {name: 1 for name in config.roles if spec_of(config, name).device}
    problems = []
    for name in (name for name, wanted in gpus.items() if wanted and name in run.here):
        device = str(_device(config, name))
        if problem := _device_problem(device, gpus[name]):
            problems.append(f"{f'roles.{name}' if name in config.roles else name}.device = {device!r} {problem}")
    if problems:
        raise ConfigError("\n".join(problems))


def _device_problem(device: str, gpus: int) -> str:
    match = _DEVICE.fullmatch(device)
    if match is None:
        return 'is no torch device; write "auto", "cpu", "cuda" or "cuda:<number>"'
    kind, index = match[1], int(match[2] or 0)
    if kind != "cuda":
        return ""
    if problem := _cuda_problem():
        return problem
    return gpu_problem(index, gpus, count_gpus())


def gpu_problem(index: int, wanted: int, count: int) -> str:
    """Describe the GPUs that an actor needs and the machine lacks; empty if it has them.

    Args:
        index: number of the actor's first GPU.
        wanted: GPUs of the actor, which follow each other.
        count: GPUs of this machine.
    """
    if index + wanted <= count:
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limited = "" if visible is None else f" (CUDA_VISIBLE_DEVICES = {visible!r})"
    needs = f"is GPU number {index}, counted from 0"
    if wanted > 1:
        needs = f"needs {wanted} GPUs" + (f", from number {index}" if index else "")
    return f"{needs}, but this machine has {count}{limited}; set another device"


def _cuda_problem() -> str:
    """Reason why CUDA cannot be used, as far as it can be known without torch, whose import takes seconds."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return "needs torch, which is not installed; pip install torch"
    if installed.endswith("+cpu"):
        return f'needs CUDA, but torch {installed} is built for CPUs; set "cpu" or "auto", or install torch with CUDA'
    if not any(Path(path).exists() for path in GPU_FILES):
        return 'needs CUDA, but this machine has no GPU; set "cpu" or "auto"'
    return ""


def has_gpu() -> bool:
    """Return whether the device "auto" may be a GPU, as far as it can be known without torch."""
    return not _cuda_problem()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


@cache
def count_gpus() -> int:
    """Return the number of GPUs that torch sees, counted in a process of its own."""
    command = [sys.executable, "-c", _COUNT_GPUS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603 our own code
        return int(done.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        msg = f"the GPUs of this machine cannot be counted: {error}; run `python -c '{_COUNT_GPUS}'`"
        raise ConfigError(msg) from error


def check_ranks(run: CheckedRun) -> Iterator[str]:
    """Compare the ranks of trainer and critic with the GPUs of this machine, or with its cores.

    Raises:
        ConfigError: there are more ranks, and the device is not set to "cpu".
    """
    for role, footprint in footprints(run.config).items():
        section, ranks = getattr(run.config, role), footprint.gpus
        if role == "rollout" or role not in run.here or ranks == 1 or section.device not in ("auto", "cpu"):
            continue  # a named GPU is checked with the devices
        setting = f"{role}.{section.backend}.ranks = {ranks}"
        if section.device == "auto" and has_gpu():
            if ranks > (gpus := count_gpus()):
                msg = f"{setting}: this machine has {gpus} GPUs, and each rank needs one; set it to at most {gpus}"
                raise ConfigError(msg)
        elif ranks > (cores := usable_cores()):
            if section.device == "auto":
                msg = (
                    f"{setting}: this machine has no GPU and {cores} cores; set at most {cores} ranks, or "
                    f'{role}.device = "cpu" for ranks that share cores'
                )
                raise ConfigError(msg)
            yield f"{setting} on {cores} cores: ranks wait for each other's cores"


def check_shared_devices(config: Config) -> Iterator[str]:
    """Note the roles that share a device.

    Raises:
        ConfigError: roles that share a device are set to different ones.
    """
    for group in config.placement.colocate:
        names = ", ".join(f"{name} ({replicas(config, name)})" for name in group)
        yield f"colocated on one device, one actor at a time: {names}; all keep their weights on it"
        devices = {name: device for name in group if (device := _device(config, name)) is not None}
        if len(set(devices.values())) > 1:
            msg = f"placement.colocate: {group} share one device, but are set to different ones: {devices}; set one"
            raise ConfigError(msg)


def _device(config: Config, role: str) -> str | None:
    """Return the torch device that is set for a role; None for roles without one."""
    if role in config.roles:
        device = config.roles[role].options.get("device", "auto" if spec_of(config, role).device else None)
        return None if device is None else str(device)
    section = getattr(config, role, None)
    return getattr(section, "device", None)


def check_folders(config: Config) -> None:
    """Check that the folder of the run and the store can be written.

    Raises:
        ConfigError: one of them cannot.
    """
    for setting, folder in (("run.folder", config.folder), ("store.path", config.store_path)):
        if problem := _folder_problem(folder.absolute()):
            msg = f"{setting} {folder} cannot be written by user {os.getuid()}: {problem}; choose another {setting}"
            raise ConfigError(msg)


def _folder_problem(folder: Path) -> str:
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is a file"
    try:
        # Permissions say too little: a file system may be read-only, or root may be another user's guest.
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except OSError as error:
        return f"{existing}, which belongs to user {existing.stat().st_uid}: {error.strerror}"


def check_broker(config: Config) -> None:
    """Check the port of the embedded broker, and the files that a run signs in with.

    Raises:
        ConfigError: the port is taken, or a file is missing.
    """
    broker = config.broker
    embedded = broker.url is None and broker.port
    if embedded and (problem := port_problem(broker.port)) and not _is_own_broker(config):
        msg = f"{problem}; set broker.port to another, or to 0 for a free one"
        raise ConfigError(msg)
    for setting, path in (("broker.credentials", broker.credentials), ("broker.ca", broker.ca)):
        if path is not None and not path.exists():
            msg = f"{setting} {path} does not exist; create credentials with `relax keys`, or correct the path"
            raise ConfigError(msg)


def _is_own_broker(config: Config) -> bool:
    """Whether the run's own broker, of a run that is up, listens on its port."""
    path = RunFolder(config.folder).broker / "address.json"
    try:
        known = Address.load(path).for_user(OPERATOR)
    except BrokerError:
        return False
    return known.url.endswith(f":{config.broker.port}") and is_jetstream_ready(known)
