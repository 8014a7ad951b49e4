"""The simulation of a real configuration, with the times of a file that describes a cluster."""

from __future__ import annotations

from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.roles import replicas, role_names
from relax_actors.roles.gpus import needs_of_roles
from relax_actors.simulation.durations import with_values


def with_times_of(cluster: Config, config: Config) -> Config:
    """Return a cluster's configuration with the sizes of a run's: rows, samples, staleness, GPUs.

    Training takes time in proportion to the samples of a step, and answers have at most the tokens that the rollout
    allows.

    Args:
        cluster: configuration with [simulate], all of whose times are set or calibrated.
        config: configuration of a run on GPUs.

    Raises:
        ConfigError: the run has no GPUs apart from those that generate, or generates nothing.
    """
    simulate = cluster.simulate
    if simulate is None:
        msg = "the file of --times has no section [simulate]; examples/simulate has examples"
        raise ConfigError(msg)
    gpus = {
        role: need.gpus * replicas(config, role) for role, need in needs_of_roles(config, role_names(config)).items()
    }
    trainer, rollout = sum(n for role, n in gpus.items() if role.startswith("trainer")), gpus.get("rollout", 0)
    if not config.generates or not rollout or not trainer or config.placement.colocate:
        msg = (
            f"--times: the trainer of {config.run.name} has {trainer} GPUs of its own and its rollout {rollout}; a run "
            "that takes turns on its GPUs or does not generate needs a section [simulate] of its own"
        )
        raise ConfigError(msg)
    samples = config.trainer.prompts_per_step * config.rollout.group_size
    growth = samples / (cluster.trainer.prompts_per_step * cluster.rollout.group_size)
    training, tokens = simulate.training, simulate.generation.tokens
    if training.device_seconds is not None:
        training = with_values(training, device_seconds=training.device_seconds * growth)
    if tokens.median is not None:
        most = float(config.rollout.max_tokens)
        tokens = with_values(tokens, most=most if tokens.most is None else min(tokens.most, most))
    section = with_values(
        simulate,
        devices=trainer + rollout,
        rollout_devices=rollout,
        staleness=tuple(sorted({0, config.staleness.max})),
        training=training,
        generation=with_values(simulate.generation, tokens=tokens),
    )
    return with_values(
        cluster,
        run=with_values(cluster.run, name=config.run.name, seed=config.run.seed),
        trainer=with_values(cluster.trainer, prompts_per_step=config.trainer.prompts_per_step),
        rollout=with_values(cluster.rollout, group_size=config.rollout.group_size),
        staleness=with_values(cluster.staleness, max=config.staleness.max),
        simulate=section,
    )
