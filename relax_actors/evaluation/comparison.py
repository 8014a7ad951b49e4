"""Comparison of two evaluations, paired by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.errors import ConfigError
from relax_actors.evaluation.estimates import Interval, mcnemar, mean_interval
from relax_actors.evaluation.figures import mean_reward, passed
from relax_actors.evaluation.records import Evaluated, Record, SetFacts

RESAMPLES = 10_000
SEED = 0
MOST_RESAMPLED = 5_000
"""Prompts above which intervals are computed without samples."""
Pair = tuple[Record, Record]


@dataclass(frozen=True, slots=True)
class Difference:
    """Means of two runs over the same prompts, and their difference.

    Attributes:
        first: mean of the first run.
        second: mean of the second run.
        interval: interval of 95 % of the difference, by a bootstrap of the prompts; None for fewer than two.
    """

    first: float
    second: float
    interval: Interval | None

    @property
    def value(self) -> float:
        """The difference."""
        return self.second - self.first

    def json(self) -> dict[str, Any]:
        """Return the difference as plain data, rounded."""
        ends = None if self.interval is None else [round(end, 4) for end in self.interval]
        return {
            "a": round(self.first, 4),
            "b": round(self.second, 4),
            "difference": round(self.value, 4),
            "interval": ends,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of the answers to the prompts that two evaluations share.

    Attributes:
        prompts: number of these prompts.
        reward: difference of the mean rewards.
        accuracy: difference of the shares of answers that pass; None where nothing can pass.
        changed: prompts that pass in the second run only, and in the first run only; None unless both runs have one
            answer, or one pair of answers, to each prompt.
        p: p-value of McNemar's test of these.
        categories: the same of each category.
    """

    prompts: int
    reward: Difference
    accuracy: Difference | None = None
    changed: tuple[int, int] | None = None
    p: float | None = None
    categories: dict[str, Comparison] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return {
            "prompts": self.prompts,
            "reward": self.reward.json(),
            "accuracy": None if self.accuracy is None else self.accuracy.json(),
            "only_b_passes": None if self.changed is None else self.changed[0],
            "only_a_passes": None if self.changed is None else self.changed[1],
            "mcnemar_p": None if self.p is None else round(self.p, 6),
            "categories": {name: each.json() for name, each in self.categories.items()},
        }


def compare(first: Evaluated, second: Evaluated) -> dict[str, Comparison]:
    """Compare two evaluations set by set, over the prompts that both have answered.

    Raises:
        ConfigError: no set of the same name shares a prompt, or a set has another reward or other `passes`.
    """
    compared = {}
    for name in first.sets:
        if name in second.sets and (pairs := pairs_of(first, second, name)):
            compared[name] = _compared_set(pairs, first.sets[name], second.sets[name], name)
    if not compared:
        msg = (
            f"evaluations {_shown(first)} and {_shown(second)} share no prompt that both have answered. Prompts "
            "are compared as the models read them: compare evaluations of sets with the same name and data, by models "
            "with the same chat template and with the same data.template and data.system"
        )
        raise ConfigError(msg)
    return compared


def pairs_of(first: Evaluated, second: Evaluated, name: str) -> list[Pair]:
    """Return answered rows with equal prompt and answer, in the first run's order.

    Of rows with equal prompts, the n-th ones are a pair.
    """
    others = _by_prompt(second, name)
    return [(record, others[key]) for key, record in _by_prompt(first, name).items() if key in others]


def _by_prompt(evaluated: Evaluated, name: str) -> dict[tuple[Any, ...], Record]:
    by_prompt: dict[tuple[Any, ...], Record] = {}
    counts: dict[tuple[Any, ...], int] = {}
    for record in evaluated.records:
        if record.set == name:
            prompt = (record.prompt, tuple(record.messages), record.answer)
            counts[prompt] = counts.get(prompt, -1) + 1
            if record.answers:
                by_prompt[*prompt, counts[prompt]] = record
    return by_prompt


def _compared_set(pairs: list[Pair], first: SetFacts, second: SetFacts, name: str) -> Comparison:
    for what, a, b in (("reward", first.reward, second.reward), ("passes", first.passes, second.passes)):
        if a != b:
            msg = f"set {name}: {what} is {a!r} in A and {b!r} in B; evaluate both with the same {what}"
            raise ConfigError(msg)
    categories = sorted({record.category for record, _ in pairs}) if first.category is not None else []
    parts = {each: [pair for pair in pairs if pair[0].category == each] for each in categories}
    by_category = {each: _compared(part, first, second) for each, part in parts.items()}
    return _compared(pairs, first, second, by_category)


def _compared(
    pairs: Sequence[Pair], first: SetFacts, second: SetFacts, categories: dict[str, Comparison] | None = None
) -> Comparison:
    rewards = np.array([(mean_reward(a), mean_reward(b)) for a, b in pairs])
    if first.passes is None:
        (reward,) = _differences(rewards)
        return Comparison(len(pairs), reward, categories=categories or {})
    passes = [(passed(a, first), passed(b, second)) for a, b in pairs]
    shares = np.array([(_share(a), _share(b)) for a, b in passes])
    reward, accuracy = _differences(rewards, shares)
    # A pair of answers passes or fails as one.
    one = first.samples == second.samples == 1 and all(share in (0, 1) for share in shares.flat)
    if not one:
        return Comparison(len(pairs), reward, accuracy, categories=categories or {})
    better, worse = int((shares[:, 1] > shares[:, 0]).sum()), int((shares[:, 1] < shares[:, 0]).sum())
    return Comparison(len(pairs), reward, accuracy, (better, worse), mcnemar(better, worse), categories or {})


def _share(passes: Sequence[bool]) -> float:
    return sum(passes) / len(passes)


def _differences(*values: NDArray[np.float64]) -> list[Difference]:
    """Return the difference of each array `[prompts, 2] float64` of values of both runs."""
    intervals = bootstrap(*(each[:, 1] - each[:, 0] for each in values))
    means = [each.mean(axis=0).tolist() for each in values]
    return [Difference(a, b, interval) for (a, b), interval in zip(means, intervals, strict=True)]


def bootstrap(*differences: NDArray[np.float64]) -> list[Interval | None]:
    """Return 95 % percentile intervals of means (Efron 1979), by 10,000 resamples.

    Each of the `differences` is `[prompts] float64`, of the same prompts. Above 5,000 prompts, where the distribution
    of a mean is as good as normal, the interval is that of `mean_interval`, so that the work is bounded. Fewer than two
    prompts have none.
    """
    source, n = np.random.default_rng(SEED), len(differences[0])
    if not 1 < n <= MOST_RESAMPLED:
        return [mean_interval(each.tolist()) for each in differences]
    # In parts, so that the drawn indices of a large set do not fill the memory.
    part = max(1, min(RESAMPLES, (1 << 22) // n))
    means: list[list[NDArray[np.float64]]] = [[] for _ in differences]
    for begin in range(0, RESAMPLES, part):
        drawn = source.integers(0, n, (min(part, RESAMPLES - begin), n))
        for own, each in zip(means, differences, strict=True):
            own.append(each[drawn].mean(axis=1))
    ends = [np.percentile(np.concatenate(own), (2.5, 97.5)).tolist() for own in means]
    return [(low, high) for low, high in ends]


def _shown(evaluated: Evaluated) -> str:
    return f"{evaluated.run}@{evaluated.version} ({', '.join(evaluated.sets)})"
