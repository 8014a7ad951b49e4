"""Check the functions that [algorithm] names, and note unusual settings."""

from __future__ import annotations

from collections.abc import Iterator

from relax_actors.algorithms.advantages.estimation import estimator_of
from relax_actors.algorithms.advantages.examples import try_advantage
from relax_actors.algorithms.named_functions import check_user_functions, has_own_functions
from relax_actors.algorithms.notes import notes
from relax_actors.config import Config


def check_functions(config: Config) -> Iterator[str]:
    """Check that the functions import; a user's advantage, policy loss and correction run on examples."""
    estimator_of(config.algorithm)
    check_user_functions(config.algorithm)
    yield from try_advantage(config)
    if has_own_functions(config.algorithm):
        from relax_actors.algorithms.policy_check import try_functions  # noqa: PLC0415 imports torch

        try_functions(config.algorithm)
    yield from notes(config)
