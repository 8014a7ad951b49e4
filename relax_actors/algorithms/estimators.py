"""Load the advantage estimator that a configuration names."""

from __future__ import annotations

from typing import Protocol, cast

from relax_actors.algorithms.advantages import Advantages, Normalise, Rewards
from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import ESTIMATORS


class Estimator(Protocol):
    """A pure function from the rewards of a group to its advantages."""

    def __call__(self, rewards: Rewards, *, normalise: Normalise) -> Advantages:
        """Estimate the advantages of one group.

        Args:
            rewards: `[n] float32`, finite, one for each sample.
            normalise: value of `advantages.normalise`.

        Returns:
            Advantages `[n] float32`.
        """


def load_estimator(name: str) -> Estimator:
    """Load an estimator by its name or dotted path.

    Raises:
        ConfigError: it does not import, or is not a function.
    """
    estimator = ESTIMATORS.load(name, "advantages.estimator")
    if not callable(estimator):
        msg = f"advantages.estimator = {name!r} is a {type(estimator).__name__}; name a function of rewards"
        raise ConfigError(msg)
    return cast("Estimator", estimator)
