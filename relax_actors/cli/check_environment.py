"""Check of the section [environment]."""

from __future__ import annotations

from collections.abc import Iterator

from relax_actors.config import Config
from relax_actors.errors import ConfigError


def check_environment(config: Config) -> Iterator[str]:
    """Check that the environment imports and takes its options, and that its actors have room for the episodes.

    Raises:
        ConfigError: it does not.
    """
    section = config.environment
    if section is None:
        return
    from relax_actors.envs.loading import load_environment
    from relax_actors.envs.tools.python import PythonEnvironment

    cls, options = load_environment(section, hosted=False)
    if section.isolation == "sandbox" and issubclass(cls, PythonEnvironment) and options["sandbox"] != "none":
        msg = (
            f'environment.options.sandbox = "{options["sandbox"]}" with environment.isolation = "sandbox": the actor, '
            'in its sandbox, can start no other one for `run_python`. Write environment.options.sandbox = "none": '
            "the code then does what the sandboxed actor may; or leave environment.isolation out"
        )
        raise ConfigError(msg)
    load_environment(section)
    episodes = config.rollout.replicas * config.rollout.max_concurrent_prompts * config.rollout.group_size
    room = section.replicas * section.sessions
    if room < episodes:
        yield (
            f"environment.replicas x environment.sessions = {room}, and the rollouts play up to {episodes} episodes at "
            "once: the others wait"
        )
