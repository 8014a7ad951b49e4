"""What to do after a step whose gradient is not finite."""

from __future__ import annotations

from typing import Literal

from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.registry.catalog import POLICY_LOSSES

Section = Literal["trainer", "critic", "trainer.warm_start"]


def diverged(error: FloatingPointError, algorithm: AlgorithmSection, section: Section) -> str:
    """Describe a gradient that is not finite, with the remedy.

    A function of the user is the likeliest cause: its loss was checked and is finite, while its gradient is not.

    Args:
        error: figure, from the engine.
        algorithm: section [algorithm] of the run.
        section: section with the learning rate of the diverged model.
    """
    if section == "trainer" and algorithm.surrogate not in POLICY_LOSSES.built_in:
        return (
            f"{error}, although the loss of algorithm.surrogate = {algorithm.surrogate!r} is finite; bound square "
            "roots, powers and divisions whose gradient is not, e.g. (x * x + 1e-12).sqrt(), and repeat `relax up`; if "
            "the gradient of the function is always finite, start a new run with a lower trainer.learning_rate"
        )
    bounds = "" if section == "trainer.warm_start" else " or tighter clip bounds"
    return f"{error}: the loss diverged; start a new run with a lower {section}.learning_rate{bounds}"
