"""Combinations of algorithm settings that make no sense: one line each, with the reason and the fix."""

from __future__ import annotations

import json
from collections.abc import Iterator

from relax_actors.algorithms.advantages.estimation import estimator_of
from relax_actors.algorithms.advantages.groups import Requirements
from relax_actors.algorithms.effective import LOSS_SETTINGS, idle, written
from relax_actors.config import Config
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.errors import ConfigError
from relax_actors.registry.registry import is_dotted

WHOLE_SAMPLES = ("rloo", "length_weighted", "greedy", "passk", "mean_ratio", "ema")
"""Estimators with one baseline for all turns of a sample; "group" becomes "turn" by itself."""
MEAN_OF_SAMPLES = ("sample_mean_of_means", "sample_weight_length")
"""Aggregations that weigh a sample's loss by a known number, whatever its length."""


def refusals(config: Config) -> Iterator[str]:
    """Yield a line for each combination of settings that cannot be meant."""
    yield from _idle(config)
    yield from _advantages(config)
    yield from _players(config)
    yield from _normalisation(config)
    yield from _components(config)
    yield from _shaping(config)
    yield from _loss(config)
    yield from _bounds(config)
    yield from _kl(config)
    yield from _correction(config)
    yield from _distillation(config)
    yield from _sampling(config)


def _idle(config: Config) -> Iterator[str]:
    """Refuse settings that the user wrote and nothing reads."""
    reasons = idle(config.algorithm)
    for key, value in written(config.algorithm).items():
        if reason := reasons.get(key):
            yield (
                f"algorithm.{key} = {json.dumps(value)} has no effect with {reason.cause}; {reason.remedy}, "
                "or remove it"
            )


def _advantages(config: Config) -> Iterator[str]:
    advantage, n = config.algorithm.advantage, config.rollout.group_size
    try:
        required = estimator_of(config.algorithm)[1]
    except ConfigError:  # reported by the check that loads the function
        required = Requirements()
    if n < required.min_samples:
        yield (
            f'rollout.group_size = {n} leaves algorithm.advantage = "{advantage}" no other sample to compare with; set '
            'rollout.group_size to 2 or more, or algorithm.advantage to "greedy", "ema", "returns" or "gae"'
        )
    if "values" in required.needs and config.critic is None:
        yield f'algorithm.advantage = "{advantage}" needs the values of a critic; add the section [critic]'
    if "squares" in required.needs and "squares" not in config.roles:
        yield (
            f'algorithm.advantage = "{advantage}" needs the sum of the squared probabilities at each token; add '
            "[roles.squares]"
        )
    credit = "episode" if config.environment is None else config.environment.credit
    if credit != "episode" and advantage in WHOLE_SAMPLES:
        yield (
            f'environment.credit = "{credit}" gives every {credit} its own return, which algorithm.advantage = '
            f'"{advantage}" would compare with whole samples; set algorithm.advantage = "turn" or "all_turns", or '
            'environment.credit = "episode"'
        )
    if "greedy" in required.needs and config.rollout.actor != "rollout":
        yield (
            f'algorithm.advantage = "{advantage}" needs one more, greedy sample of each prompt, which rollout.actor = '
            f'"{config.rollout.actor}" does not generate; use the built-in rollout, or another algorithm.advantage'
        )
    elif "greedy" in required.needs and config.environment is not None:
        yield (
            f'algorithm.advantage = "{advantage}" needs one more, greedy sample of each prompt, which episodes with '
            "[environment] do not have; choose another algorithm.advantage"
        )
    if advantage == "mean_ratio" or config.algorithm.scale == "group_mean":
        yield from _negative_rewards(config)


def _players(config: Config) -> Iterator[str]:
    """Refuse statistics of whole samples where each player of a sample has rewards of its own."""
    algorithm, environment = config.algorithm, config.environment
    if environment is None or not environment.players:
        return
    whole = {
        'algorithm.advantage = "ema"': algorithm.advantage == "ema",
        'algorithm.scale = "batch_std"': algorithm.scale == "batch_std",
        "algorithm.signal_scale = true": algorithm.signal_scale,
        'algorithm.components = "decoupled"': algorithm.components == "decoupled",
        'algorithm.whiten = "samples"': algorithm.whiten == "samples",
    }
    for setting, is_set in whole.items():
        if is_set:
            yield (
                f"{setting} has one number for a whole sample, but each of environment.players has advantages of its "
                "own; choose another setting"
            )


def _negative_rewards(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    setting = "advantage" if algorithm.advantage == "mean_ratio" else "scale"
    reasons = {
        "algorithm.shaping.overlong = true": algorithm.shaping.overlong,
        "algorithm.shaping.length_penalty": algorithm.shaping.length_penalty > 0,
        'algorithm.kl.place = "reward"': algorithm.kl.place == "reward",
    }
    for reason, holds in reasons.items():
        if holds:
            yield (
                f'algorithm.{setting} = "{getattr(algorithm, setting)}" divides by the mean reward and needs '
                f"rewards of at least 0, which {reason} can make negative; remove one of them"
            )


def _normalisation(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.whiten == "none":
        return
    scaled = algorithm.scale != "none" and "scale" not in idle(algorithm) and algorithm.components == "sum"
    if scaled:
        yield (
            f'algorithm.whiten = "{algorithm.whiten}" with algorithm.scale = "{algorithm.scale}" normalises twice; set '
            'algorithm.scale = "none", or algorithm.whiten = "none"'
        )
    if algorithm.whiten == "samples" and _has_token_advantages(algorithm):
        yield (
            f'algorithm.whiten = "samples" needs one advantage for each sample, and algorithm.advantage = '
            f'"{algorithm.advantage}" has one for each token; set algorithm.whiten = "tokens" or "none"'
        )
    if algorithm.advantage == "rloo":
        yield (
            f'algorithm.whiten = "{algorithm.whiten}" puts back the standard deviation that algorithm.advantage = '
            '"rloo" leaves out; set algorithm.whiten = "none", or algorithm.advantage = "group"'
        )


def _components(config: Config) -> Iterator[str]:
    algorithm, components = config.algorithm, config.reward_components
    if algorithm.components == "sum":
        return
    if algorithm.advantage != "group":
        yield (
            'algorithm.components = "decoupled" normalises each component within the group; set algorithm.advantage = '
            f'"group" instead of "{algorithm.advantage}", or algorithm.components = "sum"'
        )
    if len(components) < 2:  # noqa: PLR2004 one component is the reward
        yield (
            f'algorithm.components = "decoupled" needs 2 or more reward components, this run has {len(components)}; '
            "make reward.function a table of functions with weights, or set reward.components"
        )
    elif unknown := sorted(set(algorithm.weights) - set(components)):
        yield (
            f"algorithm.weights names {', '.join(map(repr, unknown))}; the reward components of the run are "
            f"{', '.join(map(repr, components))}"
        )


def _has_token_advantages(algorithm: AlgorithmSection) -> bool:
    """Whether the built-in estimators give the tokens of a sample different advantages."""
    by_kl = algorithm.advantage == "greedy" and algorithm.kl.place == "reward"
    return by_kl or algorithm.advantage in ("returns", "gae", "optimal_token", "optimal_turn", "turn", "all_turns")


def _shaping(config: Config) -> Iterator[str]:
    buffer, limit = config.algorithm.shaping.overlong_buffer, config.rollout.max_tokens
    if config.algorithm.shaping.overlong and buffer is not None and buffer > limit:
        yield (
            f"algorithm.shaping.overlong_buffer = {buffer} is more than rollout.max_tokens = {limit}; set it to at "
            "most that, or leave it out for a fifth of it"
        )


def _loss(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    sequence = algorithm.ratio.startswith("sequence") and algorithm.surrogate != "gamma"
    if sequence and algorithm.aggregate not in MEAN_OF_SAMPLES:
        yield (
            f'algorithm.ratio = "{algorithm.ratio}" with algorithm.aggregate = "{algorithm.aggregate}" weighs samples '
            'by their length; set algorithm.aggregate = "sample_mean_of_means", or "sample_weight_length" for LUSPO'
        )
    if algorithm.aggregate == "sample_weight_length" and not algorithm.ratio.startswith("sequence"):
        yield (
            f'algorithm.aggregate = "sample_weight_length" with algorithm.ratio = "{algorithm.ratio}" is the mean of '
            'sums; set algorithm.ratio = "sequence_mean" for LUSPO, or algorithm.aggregate = "sample_mean_of_sums"'
        )
    if algorithm.ratio == "none" and "ratio" in LOSS_SETTINGS.get(algorithm.surrogate, ()):
        yield (
            f'algorithm.surrogate = "{algorithm.surrogate}" reads a ratio, and algorithm.ratio is "none"; set '
            'algorithm.ratio = "token", or algorithm.surrogate = "score"'
        )
    yield from _stale_score(config)


def _stale_score(config: Config) -> Iterator[str]:
    """Refuse a loss without a ratio for data that the trained weights did not sample."""
    algorithm, updates = config.algorithm, config.trainer.updates
    if algorithm.surrogate != "score" or algorithm.correction.kind != "none":
        return
    if config.staleness.max > 0:
        yield (
            f'algorithm.surrogate = "score" has no ratio, and staleness.max = {config.staleness.max} trains samples of '
            'older weights; set staleness.max = 0, algorithm.correction.kind = "tis", or algorithm.surrogate = "clip"'
        )
    elif updates > 1:
        yield (
            f'algorithm.surrogate = "score" has no ratio, and {updates} updates of a batch train samples of older '
            "weights; set trainer.minibatches = 1 and trainer.epochs = 1, algorithm.correction.kind = "
            '"tis", or algorithm.surrogate = "clip"'
        )


def _bounds(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.clip_low > 1 and algorithm.surrogate in ("clip", "clip_weight", "clip_cov"):
        yield (
            f"algorithm.clip_low = {algorithm.clip_low:g} is the distance of the lower bound from 1, which is then "
            "below 0; set it to 1 for no lower bound, or to less"
        )


def _kl(config: Config) -> Iterator[str]:
    kl = config.algorithm.kl
    if kl.place == "loss" and kl.kind == "k1" and not (kl.k2_gradient or kl.unbiased):
        yield (
            'algorithm.kl.kind = "k1" as a term of the loss has an expected gradient of 0; set algorithm.kl.kind = '
            '"k2" or "k3", or algorithm.kl.place = "reward"'
        )
    if kl.place == "reward" and "reference" not in config.roles:
        yield (
            'algorithm.kl.place = "reward" needs log-probs of the reference before the advantages; add '
            '[roles.reference], or set algorithm.kl.place = "loss"'
        )


def _correction(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    correction, reject = algorithm.correction, algorithm.reject
    if correction.kind != "none" and algorithm.proximal == "rollout" and algorithm.surrogate != "score":
        yield (
            f'algorithm.correction.kind = "{correction.kind}" weighs by the proximal policy over the rollout policy, '
            'which are the same here; set algorithm.proximal to "trainer" or "actor_fwd"'
        )
    if correction.normalise != "none" and algorithm.surrogate in ("gamma", "geometric"):
        yield (
            f'algorithm.correction.normalise = "{correction.normalise}" with algorithm.surrogate = '
            f'"{algorithm.surrogate}" would scale the weights inside a number of the whole sample, before their mean '
            'over the step is known; set algorithm.correction.normalise = "none"'
        )
    if reject.opsm is not None and algorithm.proximal == "trainer" and config.trainer.updates == 1:
        yield (
            f"algorithm.reject.opsm = {reject.opsm:g} bounds the log-ratio of the proximal to the trained policy, "
            'which is 0 while a batch is trained once; set algorithm.proximal = "rollout", or trainer.minibatches '
            "above 1"
        )
    bounded = {"correction": correction.kind == "icepop", "reject": reject.kind != "none"}
    for section, is_bounded in bounded.items():
        if is_bounded and getattr(algorithm, section).low == 0:
            yield (
                f"algorithm.{section}.low = 0 is no lower bound of a ratio; set it between 0 and 1, such as 0.5"
                + (', or use algorithm.correction.kind = "tis"' if section == "correction" else "")
            )


def _distillation(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.distil.place != "none" and "teacher" not in config.roles:
        yield (
            f'algorithm.distil.place = "{algorithm.distil.place}" needs a teacher; add [roles.teacher] with '
            'model = "<folder>", server = <URL>, or hint for self-distillation'
        )
    if algorithm.advantage == "none" and algorithm.distil.place == "none" and not is_dotted(algorithm.surrogate):
        yield (
            'algorithm.advantage = "none" trains nothing without distillation; set algorithm.distil.place, or another '
            "algorithm.advantage"
        )


def _sampling(config: Config) -> Iterator[str]:
    if config.rollout.top_p < 1:
        yield (
            f"rollout.top_p = {config.rollout.top_p:g} samples from another distribution than the one that the "
            "trainer's log-probs are of; set rollout.top_p = 1 for training"
        )
