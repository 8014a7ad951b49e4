"""Combinations of settings that make no sense for a reward model."""

from __future__ import annotations

from collections.abc import Iterator

from relax_actors.config import Config


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
    if config.media is not None:
        yield (
            f"{head} trains a classifier of texts, and the model takes images, video or sound, for which transformers "
            "has none; use a model of text"
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
