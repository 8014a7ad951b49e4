"""Whether the steps of a run must give the same bits here, said before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from relax_actors.config import Config
from relax_actors.engines.backends import critic_section
from relax_actors.errors import ConfigError


def devices_of(config: Config) -> Iterator[tuple[str, str]]:
    """Yield setting and value of the device of each model that a replay computes."""
    yield "trainer.device", config.trainer.device
    if config.critic is not None:
        yield "critic.device", critic_section(config).device


def why_inexact(config: Config, gpu: str, recorded: Mapping[str, Sequence[str]]) -> str:
    """Return why steps may round differently when repeated; empty if they must not.

    The order of rows, seeds and the cut into micro-batches are recorded, so kernels alone decide.

    Args:
        config: settings to compute with.
        gpu: name of the GPU that torch uses here, which "auto" means; empty without one.
        recorded: devices of the checkpoints around the step, by the setting of the device of each model: the trainer
            may have moved in between. Empty where a checkpoint does not say its device.
    """
    devices = dict(devices_of(config))
    here = {
        name: f"cuda ({gpu})" if device.startswith("cuda") or (device == "auto" and gpu) else "cpu"
        for name, device in devices.items()
    }
    if (on_gpu := [name for name, device in here.items() if device != "cpu"]) and not config.run.deterministic:
        return (
            f"{' and '.join(on_gpu)}: kernels of GPUs add up in any order, so a difference in the last bits is no "
            "fault; runs with run.deterministic = true replay exactly"
        )
    for name, device in here.items():
        if others := [other for other in recorded.get(name, ()) if other not in ("", device)]:
            return (
                f"{name}: the run computed on {others[-1]}, and {device} computes here, which may round "
                "differently; a difference in the last bits is no fault"
            )
    unknown = [name for name in devices if not all(recorded.get(name, ("",)))]
    if chosen := [name for name in unknown if devices[name] == "auto"]:
        computes, other = ("a GPU", "a CPU") if gpu else ("the CPU", "a GPU")
        return (
            f'{" and ".join(chosen)} = "auto": {computes} computes here; the bits must be equal unless the run was '
            f"trained on {other}, which rounds differently"
        )
    return ""


def why_samples_inexact(device: str, gpu: str) -> str:
    """Return why samples that are drawn again may round differently; empty if they must not.

    Args:
        device: setting `rollout.device`. Nothing says what "auto" meant where a row was sampled.
        gpu: name of the GPU that torch uses here; empty without one.
    """
    if device == "cpu":
        return ""
    here = f"cuda ({gpu})" if gpu else "the CPU"
    return (
        f'rollout.device = "{device}": {here} samples here; a difference is no fault if the row was sampled on another '
        "device, which rounds differently"
    )


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
