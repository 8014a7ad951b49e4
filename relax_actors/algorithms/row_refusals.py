"""Combinations of algorithm settings and rows that make no sense."""

from __future__ import annotations

from collections.abc import Iterator

from relax_actors.algorithms.named_functions import spec_of_loss
from relax_actors.config import Config
from relax_actors.config.algorithm_parts import ShapingSection


def row_refusals(config: Config) -> Iterator[str]:
    """Refuse a loss of other rows, and for rows from the data what only sampled rows have."""
    algorithm, spec = config.algorithm, spec_of_loss(config.algorithm)
    if algorithm.rows not in spec.kinds_of_rows:
        kinds = " or ".join(f'"{kind}"' for kind in spec.kinds_of_rows)
        yield (
            f'algorithm.surrogate = "{algorithm.surrogate}" is a loss of rows = {kinds}, and algorithm.rows = '
            f'"{algorithm.rows}"; set algorithm.name to a preset, which sets both'
        )
    if spec.head != algorithm.head:
        yield (
            f'algorithm.surrogate = "{algorithm.surrogate}" is a loss of head = "{spec.head}", and algorithm.head = '
            f'"{algorithm.head}"; set algorithm.name to a preset, which sets both'
        )
    if algorithm.trains_scores:
        yield from score_refusals(config)
    if not config.from_data:
        return
    if algorithm.compares_answers and algorithm.aggregate != "sample_mean_of_sums":
        yield (
            f'algorithm.aggregate = "{algorithm.aggregate}" would weigh answers by their length; set '
            'algorithm.aggregate = "sample_mean_of_sums"'
        )
    if config.trainer.router_replay:
        yield (
            f"trainer.router_replay = true replays experts that a rollout recorded, and algorithm.rows = "
            f'"{algorithm.rows}" has none; leave it out'
        )
    sampled_only = {
        f'advantage = "{algorithm.advantage}"': algorithm.advantage != "none",
        f'correction.kind = "{algorithm.correction.kind}"': algorithm.correction.kind != "none",
        f'reject.kind = "{algorithm.reject.kind}"': algorithm.reject.kind != "none",
        "reject.opsm": algorithm.reject.opsm is not None,
        f'distil.place = "{algorithm.distil.place}"': algorithm.distil.place != "none",
        'kl.place = "reward"': algorithm.kl.place == "reward",
        "shaping": algorithm.shaping != ShapingSection(),
        f'proximal = "{algorithm.proximal}"': algorithm.proximal != "rollout",
        "log_ratio_penalty": algorithm.log_ratio_penalty != 0,
    }
    for setting in (name for name, is_set in sampled_only.items() if is_set):
        yield (
            f"algorithm.{setting} is about samples of the policy and their rewards, and rows come from the data; "
            "remove it, or choose another algorithm.name"
        )


def score_refusals(config: Config) -> Iterator[str]:
    """Yield a line for each setting that a model of scores cannot have."""
    algorithm, trainer, head = config.algorithm, config.trainer, 'algorithm.head = "scores"'
    if not config.from_data:
        yield f"{head} trains a reward model, whose rows come from the data; set algorithm.name to a preset"
    if algorithm.rows == "pairs" and algorithm.scores.classes != 1:
        yield (
            f"algorithm.scores.classes = {algorithm.scores.classes}, and each answer of a pair has one score; set it "
            "to 1"
        )
    if config.examples.train != "completion":
        yield (
            f"examples.train has no effect with {head}: scores are read at the end of an answer or of its steps; "
            "leave it out"
        )
    if config.media is not None and algorithm.rows == "steps":
        yield (
            'algorithm.rows = "steps" with a model that takes images, video or sound: scores of steps are read in '
            'texts alone; use a model of text, or algorithm.name = "reward_model" or "outcome_reward"'
        )
    if trainer.warm_start is not None:
        yield f"trainer.warm_start trains tokens, of which a model with {head} has no log-probs; leave it out"
    of_tokens = {
        'kl.place = "loss"': algorithm.kl.place == "loss",
        "entropy": algorithm.entropy.coefficient > 0 or algorithm.entropy.target is not None,
        "entropy.quantile": algorithm.entropy.quantile < 1,
    }
    for setting in (name for name, is_set in of_tokens.items() if is_set):
        yield f"algorithm.{setting} is about probabilities of tokens, and {head} has none; remove it"
