"""A run's steps and evaluations for Weights & Biases."""

from __future__ import annotations

from typing import Any

from relax_actors.errors import ConfigError
from relax_actors.monitoring.sinks import Heard


class WeightsAndBiases:
    """Logs `step/<name>` and `eval/reward` over `step` to a project, under the run's name.

    Account, mode and folder are those of wandb itself: `wandb login`, or `WANDB_MODE=offline`.

    Raises:
        ConfigError: wandb is not installed, or its service refuses.
    """

    def __init__(self, project: str, run: str) -> None:
        try:
            import wandb
        except ImportError as error:
            msg = f"--wandb needs Weights & Biases: pip install wandb ({error})"
            raise ConfigError(msg) from error
        # What this process prints and this machine does is none of the run's.
        settings = wandb.Settings(console="off", disable_git=True, x_disable_stats=True, x_disable_meta=True)
        try:
            self._run: Any = wandb.init(project=project, name=run, settings=settings)
        except wandb.errors.Error as error:
            msg = f"--wandb {project}: {error}; `wandb login`, or set WANDB_MODE=offline"
            raise ConfigError(msg) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def take(self, heard: Heard) -> None:
        """Log what is a step's or an evaluation's."""
        if (found := heard.scalars()) is not None:
            step, scalars = found
            self._run.log({"step": step, **scalars})

    def close(self) -> None:
        """Hand over what is left."""
        self._run.finish()
