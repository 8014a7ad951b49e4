"""Notes on combinations of algorithm settings that work, but are rarely meant."""

from __future__ import annotations

from collections.abc import Iterator

from relax_actors.config import Config


def notes(config: Config) -> Iterator[str]:
    """Yield a note for `relax check` on each unusual combination."""
    algorithm = config.algorithm
    if algorithm.advantage == "rloo" and algorithm.scale != "none":
        yield (
            f'algorithm.advantage = "rloo" with algorithm.scale = "{algorithm.scale}" divides by a standard deviation, '
            'which RLOO (arXiv 2402.14740) does not; set algorithm.scale = "none" for RLOO'
        )
    if algorithm.aggregate == "constant":
        yield (
            "the loss of a step is the sum over its tokens, divided by its samples x algorithm.length = "
            f"{algorithm.length}"
        )
        if algorithm.scale == "group_std" and algorithm.advantage == "group":
            yield (
                'algorithm.aggregate = "constant" with algorithm.scale = "group_std" is half of Dr. GRPO (arXiv '
                '2503.20783), whose advantages are not divided by the standard deviation; set algorithm.scale = "none" '
                "for it"
            )
