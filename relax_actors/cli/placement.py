"""Checks of placement: which roles compute log-probs, and which share a device."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from relax_actors.algorithms.named_functions import advantages_with
from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.roles import replicas, spec_of


def check_log_probs(config: Config, produced: Collection[str], read: Collection[str]) -> Iterator[str]:
    """Check that needed log-probs are computed and that no role computes unneeded ones.

    Args:
        config: configuration of the run.
        produced: columns that some role writes.
        read: columns that custom roles or the advantages read.

    Raises:
        ConfigError: a role is missing, or no role reads its column.
    """
    algorithm = config.algorithm
    wanted = {
        "reference": algorithm.needs_reference,
        "actor_fwd": algorithm.proximal == "actor_fwd",
        "squares": "squares" in read,
    }
    remedies = {
        "reference": 'algorithm.kl.place is "none"; set it to "loss" or "reward", or remove the section',
        "actor_fwd": f'algorithm.proximal is "{algorithm.proximal}"; set it to "actor_fwd", or remove the section',
        "squares": f'algorithm.advantage is "{algorithm.advantage}"; set it to '
        f"{advantages_with(lambda spec: 'squares' in spec.needs)}, or remove the section",
    }
    for name, is_wanted in wanted.items():
        if name in config.roles and not is_wanted and name not in read:
            what = "squared probabilities" if name == "squares" else "log-probs"
            msg = f"roles.{name} would compute {what} that no role reads: {remedies[name]}"
            raise ConfigError(msg)
    if wanted["actor_fwd"] and "actor_fwd" not in produced:
        msg = (
            'algorithm.proximal = "actor_fwd" needs a role that writes column actor_fwd: add [roles.actor_fwd], or set '
            'algorithm.proximal = "trainer", which uses the trainer\'s own log-probs before the step'
        )
        raise ConfigError(msg)
    if wanted["reference"] and "reference" in config.roles and "reference" not in produced:
        msg = "the actor of roles.reference does not write column reference; set its `writes`, or rename the role"
        raise ConfigError(msg)
    if wanted["reference"]:
        where = "by the role reference, from version 0" if "reference" in config.roles else "inside the trainer"
        yield f'log-probs of the reference, for the KL (algorithm.kl.place = "{algorithm.kl.place}"): computed {where}'
    proximal = {
        "rollout": "log-probs of the proximal policy: those that the tokens were sampled with",
        "trainer": "log-probs of the proximal policy: those of the trainer's own forward pass, at no further cost"
        if config.trainer.updates == 1
        else "log-probs of the proximal policy: those of a forward pass of the trainer before the first update",
        "actor_fwd": "log-probs of the proximal policy: computed by the role actor_fwd, from the newest weights",
    }
    yield proximal[algorithm.proximal]
    if wanted["actor_fwd"] and config.staleness.max == 0:
        yield 'with staleness.max = 0 they equal those of algorithm.proximal = "trainer", which needs no role'


def check_devices(config: Config) -> Iterator[str]:
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
