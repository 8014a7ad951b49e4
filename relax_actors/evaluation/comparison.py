"""Comparison of two evaluations, paired by prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relax_actors.errors import ConfigError
from relax_actors.evaluation.estimates import Interval, mcnemar
from relax_actors.evaluation.figures import mean_reward, passed
from relax_actors.evaluation.records import Evaluated, Record, SetFacts

RESAMPLES = 10_000
SEED = 0
Pair = tuple[Record, Record]


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean of each run over the same prompts, and the difference of the second run from the first.

    Attributes:
        first: mean of the first run.
        second: mean of the second run.
        interval: interval of 95 % of the difference, by a bootstrap of the prompts.
    """

    first: float
    second: float
    interval: Interval

    @property
    def value(self) -> float:
        """The difference."""
        return self.second - self.first

    def json(self) -> dict[str, Any]:
        """Return the difference as plain data, rounded."""
        ends = [round(end, 4) for end in self.interval]
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
            answer to each prompt.
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
        ConfigError: no set of the same name shares a prompt, or rewards of one are log-probs and of the other not.
    """
    found = {}
    for name in first.sets:
        if name in second.sets and (pairs := pairs_of(first, second, name)):
            found[name] = _compared_set(pairs, first.sets[name], second.sets[name], name)
    if not found:
        msg = (
            f"evaluations {_shown(first)} and {_shown(second)} share no prompt that both have answered; compare "
            "evaluations of the same sets"
        )
        raise ConfigError(msg)
    return found


def pairs_of(first: Evaluated, second: Evaluated, name: str) -> list[Pair]:
    """Return the answered rows of a set that have the same prompt and expected answer, in the order of the first run.

    Of rows with equal prompts, the n-th ones are a pair.
    """
    others = _by_prompt(second, name)
    return [(record, others[key]) for key, record in _by_prompt(first, name).items() if key in others]


def _by_prompt(evaluated: Evaluated, name: str) -> dict[tuple[Any, ...], Record]:
    found: dict[tuple[Any, ...], Record] = {}
    counts: dict[tuple[Any, ...], int] = {}
    for record in evaluated.records:
        if record.set == name:
            prompt = (record.prompt, tuple(record.messages), record.answer)
            counts[prompt] = counts.get(prompt, -1) + 1
            if record.answers:
                found[*prompt, counts[prompt]] = record
    return found


def _compared_set(pairs: list[Pair], first: SetFacts, second: SetFacts, name: str) -> Comparison:
    if (first.passes is None) != (second.passes is None):
        msg = f"set {name}: the rewards of one evaluation are log-probs, those of the other are not; compare equal ones"
        raise ConfigError(msg)
    categories = sorted({record.category for record, _ in pairs}) if first.category is not None else []
    parts = {each: [pair for pair in pairs if pair[0].category == each] for each in categories}
    by_category = {each: _compared(part, first, second) for each, part in parts.items()}
    return _compared(pairs, first, second, by_category)


def _compared(
    pairs: Sequence[Pair], first: SetFacts, second: SetFacts, categories: dict[str, Comparison] | None = None
) -> Comparison:
    reward = _difference(pairs, mean_reward, mean_reward)
    if first.passes is None:
        return Comparison(len(pairs), reward, categories=categories or {})
    passes = [(passed(a, first), passed(b, second)) for a, b in pairs]
    accuracy = _difference(pairs, lambda a: _share(passed(a, first)), lambda b: _share(passed(b, second)))
    if any(len(each) != 1 for pair in passes for each in pair):
        return Comparison(len(pairs), reward, accuracy, categories=categories or {})
    better = sum(b[0] and not a[0] for a, b in passes)
    worse = sum(a[0] and not b[0] for a, b in passes)
    return Comparison(len(pairs), reward, accuracy, (better, worse), mcnemar(better, worse), categories or {})


def _share(passes: Sequence[bool]) -> float:
    return sum(passes) / len(passes)


def _difference(
    pairs: Sequence[Pair], of_first: Callable[[Record], float], of_second: Callable[[Record], float]
) -> Difference:
    a = np.array([of_first(record) for record, _ in pairs])
    b = np.array([of_second(record) for _, record in pairs])
    return Difference(float(a.mean()), float(b.mean()), bootstrap(b - a))


def bootstrap(differences: np.ndarray[Any, Any]) -> Interval:
    """Return the percentile interval of 95 % of a mean (Efron 1979), from 10,000 samples of the prompts; same seed.

    Args:
        differences: `[prompts] float64`, difference of each prompt.
    """
    source = np.random.default_rng(SEED)
    n = len(differences)
    # In parts, so that the drawn indices of a large set do not fill the memory.
    part = max(1, min(RESAMPLES, (1 << 22) // n))
    means = [
        differences[source.integers(0, n, (min(part, RESAMPLES - begin), n))].mean(axis=1)
        for begin in range(0, RESAMPLES, part)
    ]
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)


def _shown(evaluated: Evaluated) -> str:
    return f"{evaluated.run}@{evaluated.version} ({', '.join(evaluated.sets)})"
