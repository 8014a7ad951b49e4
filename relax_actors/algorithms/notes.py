"""Notes on combinations of algorithm settings that work, but are rarely meant."""

from __future__ import annotations

from collections.abc import Iterator

from relax_actors.config import Config


def notes(config: Config) -> Iterator[str]:
    """Yield a note for `relax check` on each unusual combination."""
    algorithm, advantages = config.algorithm, config.advantages
    divides = advantages.normalise == "std"
    if advantages.estimator == "rloo" and divides:
        yield (
            'advantages.estimator = "rloo" with advantages.normalise = "std" divides by the standard deviation of the '
            'group, which RLOO (arXiv 2402.14740) does not; set advantages.normalise = "none" for RLOO'
        )
    if algorithm.loss == "constant":
        yield (
            "the loss of a step is the sum over its tokens, divided by its samples x algorithm.loss_length = "
            f"{algorithm.loss_length}"
        )
        if divides and advantages.estimator == "grpo":
            yield (
                'algorithm.loss = "constant" with advantages.normalise = "std" is half of Dr. GRPO (arXiv 2503.20783), '
                'whose advantages are not divided by the standard deviation; set advantages.normalise = "none" for it'
            )
    if algorithm.step_normalisation != "none" and divides:
        yield (
            f'algorithm.step_normalisation = "{algorithm.step_normalisation}" with advantages.normalise = "std" '
            'normalises twice, over the group and over the step; set advantages.normalise = "none" for the step alone'
        )
