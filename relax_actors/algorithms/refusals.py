"""Combinations of algorithm settings that make no sense, with reason and remedy."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

from relax_actors.algorithms.advantages.estimation import estimator_of
from relax_actors.algorithms.loss_refusals import loss_refusals
from relax_actors.algorithms.named_functions import advantages_with, spec_of_advantage
from relax_actors.algorithms.row_refusals import row_refusals
from relax_actors.algorithms.specs import AdvantageSpec
from relax_actors.algorithms.unused_settings import idle, written
from relax_actors.config import Config
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import ADVANTAGES


def refusals(config: Config, spelled: Collection[str] = ()) -> Iterator[str]:
    """Yield a line for each combination of settings that cannot be meant.

    Without `spelled`, as `relax_actors.config.load.set_by` returns it, a setting that is spelled with its default is
    not seen.
    """
    yield from _idle(config, spelled)
    yield from row_refusals(config)
    yield from _reference(config)
    if config.from_data:
        return
    yield from _advantages(config)
    yield from _players(config)
    yield from _normalisation(config)
    yield from _signal(config)
    yield from _components(config)
    yield from _shaping(config)
    yield from loss_refusals(config)
    yield from _sampling(config)


def _reference(config: Config) -> Iterator[str]:
    """Refuse a refreshed reference that nothing reads, or that the trainer keeps."""
    algorithm = config.algorithm
    if algorithm.reference_every is None:
        return
    if not algorithm.needs_reference:
        yield (
            f"algorithm.reference_every = {algorithm.reference_every} refreshes a reference that nothing reads; set "
            "algorithm.kl.place, or leave it out"
        )
    elif "reference" not in config.roles:
        yield (
            f"algorithm.reference_every = {algorithm.reference_every} needs a role that loads published weights; add "
            "[roles.reference]"
        )


def _idle(config: Config, spelled: Collection[str]) -> Iterator[str]:
    """Refuse settings that the user wrote and nothing reads."""
    reasons = idle(config.algorithm)
    for key, value in written(config.algorithm, spelled).items():
        if reason := reasons.get(key):
            yield (
                f"algorithm.{key} = {json.dumps(value)} has no effect with {reason.cause}; {reason.remedy}, "
                "or remove it"
            )


def _advantages(config: Config) -> Iterator[str]:
    advantage, n, named = config.algorithm.advantage, config.rollout.group_size, spec_of_advantage(config.algorithm)
    try:
        required = estimator_of(config.algorithm)[1]
    except ConfigError:  # reported by the check that loads the function
        required = AdvantageSpec()
    if n < required.min_samples:
        yield (
            f'rollout.group_size = {n} leaves algorithm.advantage = "{advantage}" no other sample to compare with; set '
            f"rollout.group_size to 2 or more, or algorithm.advantage to {advantages_with(_takes_one_sample)}"
        )
    if "values" in required.needs and config.critic is None:
        yield f'algorithm.advantage = "{advantage}" needs the values of a critic; add the section [critic]'
    if "squares" in required.needs and "squares" not in config.roles:
        yield (
            f'algorithm.advantage = "{advantage}" needs the sum of the squared probabilities at each token; add '
            "[roles.squares]"
        )
    credit, _ = config.credit
    if credit != "episode" and named.has_sample_baseline:
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
    if advantage == "pass_at_k":
        yield from _pass_at_k(config)
    if named.needs_positive or config.algorithm.scale == "group_mean":
        yield from _negative_rewards(config, "advantage" if named.needs_positive else "scale")


def _pass_at_k(config: Config) -> Iterator[str]:
    n, k = config.rollout.group_size, config.algorithm.pass_k
    if 1 < n < k:
        yield (
            f"algorithm.pass_k = {k} is more than the samples of a prompt, rollout.group_size = {n}; set "
            "algorithm.pass_k below that, or rollout.group_size to several times pass_k"
        )
    for reason in _changes_of_rewards(config.algorithm):
        yield (
            f'algorithm.advantage = "pass_at_k" compares rewards with algorithm.correct_reward, and {reason} lowers '
            "them first, so that correct samples count as wrong; remove one of them"
        )


def _takes_one_sample(spec: AdvantageSpec) -> bool:
    return spec.min_samples == 1 and bool(spec.needs)


def _players(config: Config) -> Iterator[str]:
    """Refuse statistics of whole samples where each player of a sample has rewards of its own."""
    algorithm, section = config.algorithm, config.playing
    yield from _rivals(config)
    if section is None or not section.players:
        return
    if algorithm.trains_sampled_pairs:
        yield (
            f'algorithm.surrogate = "preference" trains one pair of samples of a row, but each of {section.title}.'
            'players has a pair of its own; set for example algorithm.name = "grpo"'
        )
    whole = {
        (f'advantage = "{algorithm.advantage}"', 'advantage = "group"'): spec_of_advantage(algorithm).running_mean,
        ('scale = "batch_std"', 'scale = "none"'): algorithm.scale == "batch_std",
        ("signal_scale = true", "signal_scale = false"): algorithm.signal_scale,
        (f"positive_nll = {algorithm.positive_nll:g}", "positive_nll = 0"): algorithm.positive_nll > 0,
        ('components = "decoupled"', 'components = "sum"'): algorithm.components == "decoupled",
        ('whiten = "samples"', 'whiten = "none"'): algorithm.whiten == "samples",
    }
    for (setting, other), is_set in whole.items():
        if is_set:
            yield (
                f"algorithm.{setting} has one number for a whole sample, but each of {section.title}.players has "
                f"advantages of its own; set for example algorithm.{other}"
            )


def _rivals(config: Config) -> Iterator[str]:
    """Refuse rivals that are no trained players, or that nothing is compared with."""
    algorithm, section = config.algorithm, config.playing
    rivals = algorithm.rivals
    if not rivals:
        if algorithm.name == "hierarchical_grpo":
            yield (
                'algorithm.name = "hierarchical_grpo" compares several players of a sample with each other; set '
                'algorithm.rivals to their names, such as ["solver_1", "solver_2"]'
            )
        return
    trained = () if section is None else section.trained_players
    if unknown := [name for name in rivals if name not in trained]:
        known = f"trained players are {', '.join(trained)}" if trained else "the run has no players"
        yield f"algorithm.rivals names {unknown[0]!r}, but {known}; name trained players of [environment] or [agent]"
    if len(set(rivals)) == 1:
        yield (
            f"algorithm.rivals = {json.dumps(rivals)} leaves {rivals[0]!r} nobody to compare with in its sample; name "
            "two players or more, or leave it out"
        )
    if "greedy" in spec_of_advantage(algorithm).needs:
        yield (
            f'algorithm.advantage = "{algorithm.advantage}" compares with a greedy sample, and algorithm.rivals with '
            'players of the same sample; set algorithm.advantage = "group"'
        )


def _negative_rewards(config: Config, setting: str) -> Iterator[str]:
    for reason in _changes_of_rewards(config.algorithm):
        yield (
            f'algorithm.{setting} = "{getattr(config.algorithm, setting)}" divides by the mean reward and needs '
            f"rewards of at least 0, which {reason} can make negative; remove one of them"
        )


def _changes_of_rewards(algorithm: AlgorithmSection) -> list[str]:
    """Return the settings that lower the rewards of samples before their advantages."""
    changes = {
        "algorithm.shaping.overlong = true": algorithm.shaping.overlong,
        "algorithm.shaping.length_penalty": algorithm.shaping.length_penalty > 0,
        'algorithm.kl.place = "reward"': algorithm.kl.place == "reward",
    }
    return [setting for setting, is_set in changes.items() if is_set]


def _normalisation(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.advantage == "none":
        yield from _before_teacher(algorithm)
        return
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
    if spec_of_advantage(algorithm).unscaled:
        yield (
            f'algorithm.whiten = "{algorithm.whiten}" puts back the standard deviation that algorithm.advantage = '
            f'"{algorithm.advantage}" leaves out; set algorithm.whiten = "none", or algorithm.advantage = "group"'
        )


def _before_teacher(algorithm: AlgorithmSection) -> Iterator[str]:
    """Refuse step statistics of advantages of 0, before a teacher's signal."""
    acting = {
        ("whiten", f'"{algorithm.whiten}"', '"none"'): algorithm.whiten != "none",
        ("scale", '"batch_std"', '"none"'): algorithm.scale == "batch_std",
        ("signal_scale", "true", "false"): algorithm.signal_scale,
    }
    for (setting, value, off), is_set in acting.items():
        if is_set:
            yield (
                f"algorithm.{setting} = {value} acts on the advantages of rewards, which are 0 with "
                'algorithm.advantage = "none", and not on the signal of a teacher; set '
                f"algorithm.{setting} = {off}"
            )


def _signal(config: Config) -> Iterator[str]:
    """Refuse statistics of rows without signal where none lack one."""
    algorithm = config.algorithm
    equal_rewards, is_own = spec_of_advantage(algorithm).equal_rewards, algorithm.advantage not in ADVANTAGES.built_in
    compares = algorithm.components == "sum" and (equal_rewards == "zero" or (is_own and not equal_rewards))
    if algorithm.signal_scale and algorithm.advantage != "none" and not compares:
        which = (
            'algorithm.components = "decoupled"'
            if algorithm.components == "decoupled"
            else f'algorithm.advantage = "{algorithm.advantage}"'
        )
        yield (
            "algorithm.signal_scale = true takes groups of equal rewards for groups without a signal, but with "
            f"{which} they have one; set algorithm.signal_scale = false"
        )
    if not algorithm.shaping.filter_zero_variance:
        return
    if algorithm.distil.place != "none":
        yield (
            "algorithm.shaping.filter_zero_variance = true drops rows of equal rewards, in which a teacher (algorithm."
            f'distil.place = "{algorithm.distil.place}") has a signal; set algorithm.shaping.filter_zero_variance = '
            "false"
        )
    elif equal_rewards == "signal":
        yield (
            "algorithm.shaping.filter_zero_variance = true drops rows of equal rewards, and algorithm.advantage = "
            f'"{algorithm.advantage}" has a signal in them; set algorithm.shaping.filter_zero_variance = false'
        )


def _components(config: Config) -> Iterator[str]:
    algorithm, components = config.algorithm, config.reward_components
    if algorithm.components == "sum":
        return
    ignored = {
        "algorithm.shaping.overlong = true": algorithm.shaping.overlong,
        f"algorithm.shaping.length_penalty = {algorithm.shaping.length_penalty:g}": algorithm.shaping.length_penalty,
    }
    for setting in (name for name, is_set in ignored.items() if is_set):
        yield (
            f'{setting} changes the sum of the rewards, which algorithm.components = "decoupled" does not read; make '
            "it a function of reward.function with a weight of its own, or remove it"
        )
    if algorithm.kl.place == "reward":
        yield (
            'algorithm.kl.place = "reward" changes the sum of the rewards, which algorithm.components = "decoupled" '
            'does not read; set algorithm.kl.place = "loss" with algorithm.kl.kind = "k2" or "k3"'
        )
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
            f"algorithm.weights names {', '.join(map(repr, unknown))}, which is no reward component of the run; name "
            f"{' or '.join(map(repr, components))}"
        )


def _has_token_advantages(algorithm: AlgorithmSection) -> bool:
    """Whether the built-in estimators give the tokens of a sample different advantages."""
    spec = spec_of_advantage(algorithm)
    by_kl = "greedy" not in spec.needs or algorithm.kl.place == "reward"
    return algorithm.advantage in ADVANTAGES.built_in and spec.per_token and by_kl


def _shaping(config: Config) -> Iterator[str]:
    shaping, environment, limit = config.algorithm.shaping, config.environment, config.longest_sample
    if not shaping.overlong:
        return
    buffer, setting = shaping.overlong_buffer, "rollout.max_tokens"
    if environment is not None:
        setting = "environment.token_budget"
        if environment.players or environment.token_budget is None:
            problem, remedy = "is not set", f"set {setting}, or algorithm.shaping.overlong = false"
            if environment.players:
                problem = "is shared by environment.players"
                remedy = "set algorithm.shaping.overlong = false"
            yield (
                "algorithm.shaping.overlong = true lowers the reward of episodes that come close to "
                f"{setting}, which {problem} (rollout.max_tokens is the limit of one turn); {remedy}"
            )
            return
    elif config.agent is not None:
        yield (
            "algorithm.shaping.overlong = true lowers the reward of samples that come close to rollout.max_tokens, "
            "which is the limit of one answer of an agent and not of its sample; set algorithm.shaping.overlong = false"
        )
        return
    if buffer is not None and buffer > limit:
        yield (
            f"algorithm.shaping.overlong_buffer = {buffer} is more than {setting} = {limit}; set it to at "
            "most that, or leave it out for a fifth of it"
        )


def _sampling(config: Config) -> Iterator[str]:
    if config.rollout.top_p < 1:
        yield (
            f"rollout.top_p = {config.rollout.top_p:g} samples from another distribution than the one that the "
            "trainer's log-probs are of; set rollout.top_p = 1 for training"
        )
