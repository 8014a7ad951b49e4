"""The reward that an environment gave."""

from __future__ import annotations

from relax_actors.errors import RowError
from relax_actors.messages import Prompt, Sample


def environment(completion: str, prompt: Prompt, sample: Sample | None = None) -> float:
    """Return the sum of the rewards that the environment of an episode gave.

    Raises:
        RowError: the sample is no episode, nor the work of an agent that reported a reward.
    """
    del completion, prompt
    if sample is None or "environment_reward" not in sample.metrics:
        msg = (
            'reward "environment" needs samples that an environment or an agent has rewarded; set [environment] or '
            "[agent]"
        )
        raise RowError(msg)
    return sample.metrics["environment_reward"]
