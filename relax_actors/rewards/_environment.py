"""The reward that an environment gave."""

from __future__ import annotations

from relax_actors.errors import RowError
from relax_actors.messages import Prompt, Sample


def environment(completion: str, prompt: Prompt, sample: Sample | None = None) -> float:
    """Return the sum of the rewards that the environment of an episode gave.

    Raises:
        RowError: the sample is no episode.
    """
    del completion, prompt
    if sample is None or "environment_reward" not in sample.metrics:
        msg = 'reward "environment" needs samples that an environment has rewarded; set [environment]'
        raise RowError(msg)
    return sample.metrics["environment_reward"]
