"""Check the functions that [algorithm] names, and note unusual settings."""

from __future__ import annotations

from collections.abc import Iterator

from relax_actors.algorithms.advantages.estimation import estimator_of
from relax_actors.algorithms.advantages.examples import try_advantage
from relax_actors.algorithms.named_functions import check_user_functions, has_own_functions, readers, spec_of_advantage
from relax_actors.algorithms.unused_settings import idle
from relax_actors.config import Config
from relax_actors.registry.catalog import POLICY_LOSSES


def check_functions(config: Config) -> Iterator[str]:
    """Check that functions import; a user's own ones are run on examples."""
    estimator_of(config.algorithm)
    check_user_functions(config.algorithm)
    if not config.from_data:
        yield from try_advantage(config)
    if has_own_functions(config.algorithm):
        from relax_actors.algorithms.policy_check import try_functions  # noqa: PLC0415 imports torch

        try_functions(config.algorithm)
    yield from notes(config)


def notes(config: Config) -> Iterator[str]:
    """Yield a note for `relax check` on each unusual combination."""
    algorithm, advantage = config.algorithm, spec_of_advantage(config.algorithm)
    if advantage.unscaled and algorithm.scale != "none":
        yield (
            f'algorithm.advantage = "{algorithm.advantage}" with algorithm.scale = "{algorithm.scale}" divides by a '
            f'standard deviation, which {advantage.unscaled} does not; set algorithm.scale = "none" for it'
        )
    if algorithm.clip_high < algorithm.clip_low and not {"clip_low", "clip_high"} & idle(algorithm).keys():
        yield (
            f"algorithm.clip_high = {algorithm.clip_high:g} is below algorithm.clip_low = {algorithm.clip_low:g}: "
            "tokens may lose more probability than they may gain"
        )
    if advantage.plain_gradient and (extra := _exploration(config)):
        yield (
            f'algorithm.advantage = "{algorithm.advantage}" is meant for the plain policy gradient, without {extra} '
            f"({advantage.plain_gradient})"
        )
    no_ratio = config.staleness.max == 0 and config.trainer.updates == 1
    if no_ratio and algorithm.surrogate in readers(POLICY_LOSSES, "covariance_coefficient"):
        yield (
            f'algorithm.surrogate = "{algorithm.surrogate}" with staleness.max = 0 and one update of a batch is the '  # noqa: S608 no query
            "plain policy gradient: log-ratios are 0, and so is the gradient of their penalty; set trainer.minibatches "
            "or trainer.epochs above 1, or staleness.max above 0"
        )
    if algorithm.kl.place == "reward" and advantage.compares_samples and algorithm.components == "sum":
        yield (
            'algorithm.kl.place = "reward" with algorithm.advantage = '
            f'"{algorithm.advantage}" subtracts the sum of a sample\'s KL from its reward, before the group is compared'
        )
    credit, _ = config.credit
    if credit != "episode" and algorithm.advantage == "turn":
        yield (
            f'environment.credit = "{credit}": algorithm.advantage = "turn" takes the place of "group" and compares a '
            f'{credit} with those of the same number in the group; set "all_turns" to compare it with all of the group'
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


def _exploration(config: Config) -> str:
    """Name the KL and the entropy bonus that a run has."""
    algorithm = config.algorithm
    entropy = algorithm.entropy.coefficient > 0 or algorithm.entropy.target is not None
    return " and ".join(["a KL"] * (algorithm.kl.place != "none") + ["an entropy bonus"] * entropy)
