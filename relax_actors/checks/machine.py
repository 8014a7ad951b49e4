"""Checks of this machine: devices, folders, ports and addresses."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from broker.address import Address
from broker.errors import BrokerError
from broker.permissions import OPERATOR
from broker.server import is_jetstream_ready, port_problem
from relax_actors.config import Config
from relax_actors.data.checked_run import CheckedRun
from relax_actors.devices.inventory import DRIVER_FILES, torch_version
from relax_actors.devices.placement import needs_of_actors, place, shown
from relax_actors.engines.backends import footprints
from relax_actors.errors import ConfigError
from relax_actors.roles import replicas
from relax_actors.roles.gpus import DEVICE, device_of_role, footprints_of_roles, needs_of_roles
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.sandbox import SANDBOX, is_sandboxed


def check_devices(run: CheckedRun) -> Iterator[str]:
    """Note which actor that starts on this machine computes on which of its GPUs.

    Raises:
        ConfigError: one line for each setting that names no device, and for each actor that lacks GPUs.
    """
    config, gpus = run.config, run.inventory
    wanted = footprints_of_roles(config, run.here)
    problems = []
    for role in (role for role, footprint in wanted.items() if footprint.gpus):
        device = device_of_role(config, role) or "auto"
        if problem := _device_problem(device, is_simulated=gpus.is_simulated):
            problems.append(f"{f'roles.{role}' if role in config.roles else role}.device = {device!r} {problem}")
        if gpus.gpus and is_sandboxed(config, role):
            problems.append(
                f"role {role} has GPUs and isolation = {SANDBOX!r}: a sandbox shows no GPU; set its gpus = 0, or its "
                'isolation = "none"'
            )
    if problems:
        raise ConfigError(*problems)
    if not gpus.is_complete:
        return
    actors = {role: [f"{role}.{n}" for n in range(replicas(config, role))] for role in wanted}
    placement = place(needs_of_actors(needs_of_roles(config, run.here), actors), gpus.numbers)
    if placement.problems:
        raise ConfigError(*placement.problems.values())
    if placement.gpus:
        leased = ", ".join(f"{actor} {shown(numbers)}" for actor, numbers in placement.gpus.items())
        yield f"{gpus}: {leased}"
    if placement.on_cpu:
        yield (
            f"on the CPU, as no GPU is free: {', '.join(placement.on_cpu)}; let roles take turns on a GPU "
            "(placement.colocate), or take fewer replicas"
        )


def _device_problem(device: str, *, is_simulated: bool) -> str:
    match = DEVICE.fullmatch(device)
    if match is None:
        return 'is no torch device; write "auto", "cpu", "cuda" or "cuda:<number>"'
    return "" if is_simulated or match[1] != "cuda" else _cuda_problem()


def _cuda_problem() -> str:
    """Reason why CUDA is unusable, found without importing torch."""
    if not (installed := torch_version()):
        return "needs torch, which is not installed; pip install torch"
    if installed.endswith("+cpu"):
        return f'needs CUDA, but torch {installed} is built for CPUs; set "cpu" or "auto", or install torch with CUDA'
    if not any(Path(path).exists() for path in DRIVER_FILES):
        return 'needs CUDA, but this machine has no GPU; set "cpu" or "auto"'
    return ""


def has_gpu() -> bool:
    """Return whether the device "auto" may be a GPU, as far as it can be known without torch."""
    return not _cuda_problem()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def check_ranks(run: CheckedRun) -> Iterator[str]:
    """Compare the ranks of trainer and critic on a machine without GPUs with its cores.

    Raises:
        ConfigError: there are more ranks, and the device is not set to "cpu".
    """
    for role, footprint in footprints(run.config).items():
        section, ranks = getattr(run.config, role), footprint.gpus
        on_gpu = section.device not in ("auto", "cpu") or (section.device == "auto" and run.inventory.gpus)
        if role == "rollout" or role not in run.here or ranks == 1 or on_gpu or ranks <= (cores := usable_cores()):
            continue
        setting = f"{role}.{section.backend}.ranks = {ranks}"
        if section.device == "auto":
            msg = (
                f"{setting}: this machine has no GPU and {cores} cores; set at most {cores} ranks, or "
                f'{role}.device = "cpu" for ranks that share cores'
            )
            raise ConfigError(msg)
        yield f"{setting} on {cores} cores: ranks wait for each other's cores"


MEMORY_MEANWHILE = {
    "none": "all keep their memory on it",
    "host": "their memory moves from a GPU to the host meanwhile",
    "disk": "their memory moves to the disk meanwhile",
}
"""Notes on the values of `placement.release`."""


def check_shared_devices(config: Config) -> Iterator[str]:
    """Note roles that share a device; raises ConfigError for different devices."""
    for group in config.placement.colocate:
        names = ", ".join(f"{name} ({replicas(config, name)})" for name in group)
        memory = MEMORY_MEANWHILE[config.placement.release]
        yield f"colocated on one device, one actor at a time: {names}; {memory}"
        devices = {name: device for name in group if (device := device_of_role(config, name)) is not None}
        if len(set(devices.values())) > 1:
            msg = f"placement.colocate: {group} share one device, but are set to different ones: {devices}; set one"
            raise ConfigError(msg)


def check_folders(config: Config) -> None:
    """Check that the run's folder and the store are writable; raises ConfigError."""
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
    """Check the embedded broker's ports, and sign-in files; raises ConfigError."""
    broker = config.broker
    embedded = broker.url is None and broker.port
    if embedded and (problem := port_problem(broker.port)) and not _is_own_broker(config):
        msg = f"{problem}; set broker.port to another, or to 0 for a free one"
        raise ConfigError(msg)
    if broker.websocket is not None and (problem := port_problem(broker.websocket)) and not _is_up(config):
        msg = f"{problem}; set broker.websocket to another, or leave it out for no WebSocket"
        raise ConfigError(msg)
    for setting, path in (("broker.credentials", broker.credentials), ("broker.ca", broker.ca)):
        if path is not None and not path.exists():
            msg = f"{setting} {path} does not exist; create credentials with `relax keys`, or correct the path"
            raise ConfigError(msg)


def _is_own_broker(config: Config) -> bool:
    """Whether the run's own broker, of a run that is up, listens on its port."""
    known = _own_address(config)
    return known is not None and known.url.endswith(f":{config.broker.port}") and is_jetstream_ready(known)


def _is_up(config: Config) -> bool:
    """Whether the run's own broker answers."""
    known = _own_address(config)
    return known is not None and is_jetstream_ready(known)


def _own_address(config: Config) -> Address | None:
    try:
        return Address.load(RunFolder(config.folder).broker / "address.json").for_user(OPERATOR)
    except BrokerError:
        return None
