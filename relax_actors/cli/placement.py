"""What the check of a configuration says about placement: which log-probs are needed, and who computes them where."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.roles import replicas, spec_of


def scored(config: Config, produced: Collection[str], read: Collection[str]) -> Iterator[str]:
    """Whether the roles that compute log-probs are needed, and why.

    Args:
        config: the run's.
        produced: columns that some role writes.
        read: columns that a role of the user's, or the advantages, read.

    Raises:
        ConfigError: one is needed and missing, or would work for nobody.
    """
    algorithm = config.algorithm
    wanted = {"reference": algorithm.kl_coefficient > 0, "actor_fwd": algorithm.proximal == "actor_fwd"}
    remedies = {
        "reference": "algorithm.kl_coefficient is 0: set it above 0, or remove the section",
        "actor_fwd": f'algorithm.proximal is "{algorithm.proximal}": set it to "actor_fwd", or remove the section',
    }
    for name, is_wanted in wanted.items():
        if name in config.roles and not is_wanted and name not in read:
            msg = f"roles.{name} would compute log-probs that nobody reads, for {remedies[name]}"
            raise ConfigError(msg)
    if wanted["actor_fwd"] and "actor_fwd" not in produced:
        msg = (
            'algorithm.proximal = "actor_fwd" needs a role that writes column actor_fwd: add [roles.actor_fwd], or set '
            'algorithm.proximal = "trainer", for which the trainer takes its own log-probs before the step'
        )
        raise ConfigError(msg)
    if wanted["reference"] and "reference" in config.roles and "reference" not in produced:
        msg = "roles.reference has an actor that writes another column than reference; set `writes`, or rename the role"
        raise ConfigError(msg)
    if wanted["reference"]:
        where = "by actors of its own, from version 0" if "reference" in config.roles else "inside the trainer"
        yield f"log-probs of the reference, for the KL (algorithm.kl_coefficient > 0): computed {where}"
    else:
        yield "log-probs of a reference are not needed: algorithm.kl_coefficient = 0"
    proximal = {
        "rollout": "log-probs of the proximal policy are those that the tokens were sampled with",
        "trainer": "log-probs of the proximal policy are those of the trainer's own pass, which costs no other",
        "actor_fwd": "log-probs of the proximal policy: computed by actors of their own, from the newest weights",
    }
    yield proximal[algorithm.proximal]
    if wanted["actor_fwd"] and config.staleness.max == 0:
        yield 'with staleness.max = 0 they are what algorithm.proximal = "trainer" gives without a role'


def placed(config: Config) -> Iterator[str]:
    """Who shares a device."""
    for group in config.placement.colocate:
        names = ", ".join(f"{name} ({replicas(config, name)})" for name in group)
        yield f"on one device, one actor at a time: {names}; all keep their weights on it"
        devices = {name: device for name in group if (device := _device(config, name)) is not None}
        if len(set(devices.values())) > 1:
            msg = f"placement.colocate: {group} are on one device, but are told different ones: {devices}; set one"
            raise ConfigError(msg)


def _device(config: Config, role: str) -> str | None:
    """The torch device that a role is told; None for roles that are told none."""
    if role in config.roles:
        device = config.roles[role].options.get("device", "auto" if spec_of(config, role).device else None)
        return None if device is None else str(device)
    section = getattr(config, role, None)
    return getattr(section, "device", None)
