"""Made-up groups for trying a user's advantage estimator, in tests and checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from relax_actors.algorithms.advantages.estimation import estimator_of
from relax_actors.algorithms.advantages.groups import Array, Group, check_advantages
from relax_actors.algorithms.named_functions import call_user_function
from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import ADVANTAGES

SIZES = (2, 3, 5)


def try_advantage(config: Config) -> Iterator[str]:
    """Run a user's estimator on example groups; yield a note about refused ones.

    Raises:
        ConfigError: it refuses all examples, raised another exception, or did not return one finite number for each
            sample or token.
    """
    algorithm = config.algorithm
    if algorithm.advantage in ADVANTAGES.built_in or algorithm.components == "decoupled":
        return
    function, required = estimator_of(algorithm)
    sizes = [n for n in SIZES if n >= required.min_samples] if config.rollout.group_size > 1 else [1]
    source = f"algorithm.advantage = {algorithm.advantage!r}"
    refused: list[tuple[str, Exception]] = []
    examples = list(example_groups(sizes, config.reward_components))
    for name, group in examples:
        try:
            advantages = call_user_function(function, source, group)
            check_advantages(np.asarray(advantages), group, source)
        except (ConfigError, ValueError) as error:
            if not isinstance(error.__cause__, ValueError):
                msg = f"{error} (tried on a made-up {name})"
                raise ConfigError(msg) from error
            refused.append((name, error))
    if not refused:
        return
    name, first = refused[0]
    if len(refused) == len(examples):
        msg = f"{first} (tried on {len(examples)} made-up groups, which were all refused)"
        raise ConfigError(msg) from first
    yield (
        f"{source} refuses {len(refused)} of {len(examples)} made-up groups, such as a {name}: {first.__cause__}; rows "
        "like it are quarantined"
    )


def example_groups(
    sizes: Sequence[int] = (1, 3, 5), components: Sequence[str] = ("first", "second")
) -> Iterator[tuple[str, Group]]:
    """Yield named example groups: ragged, empty, masked, equal, of one sample.

    `sizes` are the numbers of samples, at most 5 each, and `components` the names of the reward components.
    """
    source = np.random.default_rng(0)
    for n in sizes:
        lengths = np.array([3, 0, 6, 1, 4][:n])
        # In float64, the mean of three times 0.1 is not 0.1.
        for kind, rewards in (("equal rewards", np.full(n, 0.1)), ("rewards", np.abs(source.normal(size=n)))):
            yield f"group of {n}, {kind}", _group(source, rewards, lengths, components, masked=False)
            yield f"group of {n}, {kind}, masked tokens", _group(source, rewards, lengths, components, masked=True)


def _group(
    source: np.random.Generator, rewards: Array, lengths: Array, components: Sequence[str], *, masked: bool
) -> Group:
    total = int(lengths.sum())
    mask = source.random(total) < 0.6 if masked else np.ones(total, np.bool_)  # noqa: PLR2004 a share of the tokens
    squares = source.uniform(0.1, 0.9, total)
    return Group(
        rewards=rewards,
        lengths=lengths,
        loss_mask=mask,
        values=source.normal(size=total),
        logprobs=np.log(squares),
        squares=squares,
        components={name: rewards / len(components) for name in components},
        greedy_reward=0.7,
        role="player",
    )
