"""Check of the section [environment]."""

from __future__ import annotations

from collections.abc import Iterator

from relax_actors.config import Config


def check_environment(config: Config) -> Iterator[str]:
    """Check that the environment imports and takes its options, and that its actors have room for the episodes.

    Raises:
        ConfigError: it does not.
    """
    section = config.environment
    if section is None:
        return
    from relax_actors.envs.loading import load_environment

    load_environment(section)
    episodes = config.rollout.replicas * config.rollout.max_concurrent_prompts * config.rollout.group_size
    room = section.replicas * section.sessions
    if room < episodes:
        yield (
            f"environment.replicas x environment.sessions = {room}, and the rollouts play up to {episodes} episodes at "
            "once: the others wait"
        )
