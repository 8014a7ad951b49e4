"""Notes on settings whose effect together is not obvious, and a check of the files of a model."""

from __future__ import annotations

from collections.abc import Iterator

from relax_actors.config.schema import Config
from relax_actors.errors import ConfigError


def check_steps(config: Config) -> Iterator[str]:
    """Note the size of a step, the number of rows in flight, and settings that are longer than the run."""
    trainer, rollout = config.trainer, config.rollout
    if config.from_data:
        yield f"the run has no rollout: a step trains {trainer.prompts_per_step} {config.algorithm.rows} of the data"
    elif config.data.has_traces:
        yield f"the run has no rollout: a step trains {trainer.prompts_per_step} rows of recorded samples"
    else:
        samples = trainer.prompts_per_step * rollout.group_size
        yield f"a step trains {trainer.prompts_per_step} rows x {rollout.group_size} samples = {samples} completions"
    if trainer.updates > 1:
        rows = trainer.prompts_per_step // trainer.minibatches
        yield (
            f"a batch is used for {trainer.updates} optimizer updates of {rows} rows each (trainer.minibatches = "
            f"{trainer.minibatches}, trainer.epochs = {trainer.epochs}); a step is computed when all of its rows are "
            "there, as with trainer.stream = false"
        )
    window = trainer.prompts_per_step * (config.staleness.max + 1)
    yield f"at most {window} rows are in flight (staleness.max = {config.staleness.max})"
    if config.staleness.max > 0 and config.run.deterministic and config.generates:
        yield "run.deterministic with staleness.max > 0: rows still depend on the time at which weights arrive"
    yield from shortened(config)


def shortened(config: Config) -> Iterator[str]:
    """Note the settings that `run.steps` cuts short, so that any run can be shortened by this setting alone."""
    trainer, steps = config.trainer, config.run.steps
    if trainer.warmup_steps > steps:
        yield (
            f"trainer.warmup_steps = {trainer.warmup_steps} is cut to run.steps = {steps}: the learning rate reaches "
            "its peak at the last step"
        )
    if not steps:
        what = "nothing is" if config.eval is None else "version 0 is evaluated, and nothing is"
        yield f"run.steps = 0: {what} trained"
        return
    if trainer.checkpoint_every > steps:
        yield (
            f"trainer.checkpoint_every = {trainer.checkpoint_every} is more than run.steps = {steps}: checkpoints are "
            "written before the first and after the last step only"
        )
    if config.critic is not None and config.critic.warmup_steps >= steps:
        yield (
            f"critic.warmup_steps = {config.critic.warmup_steps} leaves no step of run.steps = {steps} to train the "
            "policy: its weights stay those of version 0"
        )
    if config.eval is not None and config.eval.every > steps:
        yield (
            f"eval.every = {config.eval.every} is more than run.steps = {steps}: versions 0 and {steps} are evaluated"
        )
    if trainer.warm_start is not None and trainer.warm_start.steps > steps:
        yield (
            f"trainer.warm_start.steps = {trainer.warm_start.steps} is more than run.steps = {steps}: these supervised "
            "steps come before version 0 and are not cut"
        )


def check_weight_files(config: Config) -> Iterator[str]:
    """Check that a model folder with weights has them in the format that is read."""
    path = config.model.path
    if path is None or any(path.glob("*.safetensors")):
        return
    if others := sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in path.glob(pattern)):
        msg = f"model.path {path} has no *.safetensors, only {', '.join(others)}; convert the weights to safetensors"
        raise ConfigError(msg)
    yield f"model.path {path} has no *.safetensors: weights are drawn at random from run.seed"
