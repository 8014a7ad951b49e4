"""Length of a run that is given in passes over its data."""

from __future__ import annotations

from relax_actors.config import Config
from relax_actors.data.mixture import rows_of_epochs
from relax_actors.data.prompt_maker import open_data
from relax_actors.errors import ConfigError


def with_epochs(config: Config) -> Config:
    """Return a configuration with steps and rows by `run.epochs`, if set.

    Raises:
        ConfigError: the data cannot be opened, or `run.rows` is set by hand.
    """
    run, size = config.run, config.trainer.prompts_per_step
    if run.rows is not None:
        msg = (
            f"run.rows = {run.rows} follows from run.epochs and the data; leave it out, and set run.epochs or run.steps"
        )
        raise ConfigError(msg)
    if run.epochs is None:
        return config
    rows = rows_of_epochs(config.data, open_data(config.data, config.media), run.epochs, size)
    if "steps" in run.model_fields_set:
        rows = min(rows, run.steps * size)
    own = run.model_copy(update={"rows": rows, "steps": -(-rows // size)})
    return config.model_copy(update={"run": own})
