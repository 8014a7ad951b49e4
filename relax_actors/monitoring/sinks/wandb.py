"""Sink that logs to Weights & Biases."""

from __future__ import annotations

from typing import Any

from relax_actors.errors import ConfigError
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.monitoring.sinks.base import KnownNames


class WeightsAndBiases:
    """Sink of `step/<name>` and `eval/reward` over `step`, under the name of the run.

    wandb itself is configured as usual: `wandb login`, or `WANDB_MODE=offline` and `WANDB_DIR`.

    Raises:
        ConfigError: wandb is not installed, or its service refuses.
    """

    def __init__(self, target: str, run: str) -> None:
        try:
            import wandb
        except ImportError as error:
            msg = f"--sink wandb needs Weights & Biases: pip install 'relax-actors[wandb]' ({error})"
            raise ConfigError(msg) from error
        # Output and load of the monitor's process say nothing about the run.
        settings = wandb.Settings(console="off", disable_git=True, x_disable_stats=True, x_disable_meta=True)
        try:
            self._run: Any = wandb.init(project=target, name=run, settings=settings)
        except wandb.errors.Error as error:
            msg = f"--sink wandb={target}: {error}; run `wandb login`, or set WANDB_MODE=offline"
            raise ConfigError(msg) from error
        self._names = KnownNames()
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def take(self, message: LogMessage) -> None:
        """Log the scalars of a step or an evaluation."""
        if (figures := message.scalars()) is not None:
            step, scalars = figures
            self._run.log({"step": step, **self._names.keep(scalars)})

    def close(self) -> None:
        """Upload what is buffered, and finish the run."""
        self._run.finish()
