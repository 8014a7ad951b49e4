"""Advantage estimators by name, and their token forms, which also take rewards of single tokens."""

from __future__ import annotations

from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from relax_actors.algorithms.advantages import Advantages, Normalise, Rewards, group_advantages, token_advantages
from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import ADVANTAGES


class Estimator(Protocol):
    """Pure function from the rewards of a group to the advantages of its samples."""

    def __call__(self, rewards: Rewards, *, normalise: Normalise) -> Advantages:
        """Estimate the advantages of one group.

        Args:
            rewards: `[n] float32`, finite, one for each sample.
            normalise: "std" with `algorithm.scale = "group_std"`, else "none".

        Returns:
            Advantages `[n] float32`.
        """


class TokenEstimator(Protocol):
    """Pure function from the rewards of a group and of its tokens to advantages of tokens."""

    def __call__(
        self, rewards: Rewards, token_rewards: Rewards, lengths: NDArray[np.integer[Any]], *, normalise: Normalise
    ) -> Advantages:
        """Estimate the advantages of the tokens of one group.

        Args:
            rewards: `[n] float32`, finite, one for each sample.
            token_rewards: `[total] float32`, finite, tokens of all samples end to end.
            lengths: `[n]` integers, tokens of each sample.
            normalise: "std" with `algorithm.scale = "group_std"`, else "none".

        Returns:
            Advantages `[total] float32`.
        """


def token_form(estimator: Estimator) -> TokenEstimator | None:
    """Return the form of an estimator that also takes rewards of single tokens; None if it has none."""
    return token_advantages if estimator is group_advantages else None


def load_estimator(name: str) -> Estimator:
    """Load an estimator by its registered name or dotted path.

    Raises:
        ConfigError: it does not import, or is not a function.
    """
    estimator = ADVANTAGES.load(name, "algorithm.advantage")
    if not callable(estimator):
        msg = f"algorithm.advantage = {name!r} is a {type(estimator).__name__}; name a function of rewards"
        raise ConfigError(msg)
    return cast("Estimator", estimator)
