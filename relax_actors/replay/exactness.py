"""Whether the steps of a run must give the same bits here, said before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator

from relax_actors.config import Config
from relax_actors.engines.backends import critic_section
from relax_actors.errors import ConfigError


def devices_of(config: Config) -> Iterator[tuple[str, str]]:
    """Yield setting and value of the device of each model that a replay computes."""
    yield "trainer.device", config.trainer.device
    if config.critic is not None:
        yield "critic.device", critic_section(config).device


def why_inexact(config: Config, gpus: int) -> str:
    """Return why the steps of a run may round differently when they are computed again; empty if they must not.

    The order of rows, seeds and the cut into micro-batches are recorded, so kernels alone decide. The log does not say
    which device "auto" meant in the run.

    Args:
        config: settings to compute with.
        gpus: GPUs that torch can use here, which "auto" means.
    """
    devices = dict(devices_of(config))
    on_gpu = [name for name, device in devices.items() if device.startswith("cuda") or (device == "auto" and gpus)]
    if on_gpu and not config.run.deterministic:
        return (
            f"{' and '.join(on_gpu)}: kernels of GPUs add up in any order, so a difference in the last bits is no "
            "fault; runs with run.deterministic = true replay exactly"
        )
    if chosen := [name for name, device in devices.items() if device == "auto"]:
        here, other = ("a GPU", "a CPU") if gpus else ("the CPU", "a GPU")
        return (
            f'{" and ".join(chosen)} = "auto": {here} computes here; the bits must be equal unless the run was trained '
            f"on {other}, which rounds differently"
        )
    return ""


def check_devices(config: Config, gpus: int) -> None:
    """Refuse to compute a run on a machine that lacks the devices that its settings name.

    Raises:
        ConfigError: a setting names a GPU that torch cannot use here.
    """
    for name, device in devices_of(config):
        kind, _, number = device.partition(":")
        if kind == "cuda" and int(number or 0) >= gpus:
            present = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "no GPU"
            msg = (
                f"{name} = {device!r}, and torch can use {present} here: replay on a machine with the GPUs of the run, "
                f"or give {name}=cpu to see what another processor computes"
            )
            raise ConfigError(msg)
