"""Figures of an evaluation's sets with 95 % intervals: reward, pass@k, majority@k."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from relax_actors.evaluation.estimates import Interval, majority_at_k, mean_interval, pass_at_k, wilson
from relax_actors.evaluation.records import Evaluated, Record, SetFacts


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure and its interval of 95 %; None for the interval of a mean of fewer than two rows."""

    value: float
    interval: Interval | None

    def json(self) -> dict[str, Any]:
        """Return the figure as plain data, rounded."""
        interval = None if self.interval is None else [round(end, 4) for end in self.interval]
        return {"value": round(self.value, 4), "interval": interval}


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of rows.

    Attributes:
        rows: rows with answers.
        failed: rows that were quarantined or dropped; no figure counts them.
        reward: mean reward; None without rows.
        accuracy: share of answers that pass; None if nothing can pass, or without rows.
        pass_at: pass@k by k.
        majority_at: majority@k by k.
        categories: the same figures of the rows of each category.
    """

    rows: int
    failed: int
    reward: Figure | None
    accuracy: Figure | None
    pass_at: dict[int, Figure] = field(default_factory=dict)
    majority_at: dict[int, Figure] = field(default_factory=dict)
    categories: dict[str, Figures] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {
            "rows": self.rows,
            "failed": self.failed,
            "reward": None if self.reward is None else self.reward.json(),
            "accuracy": None if self.accuracy is None else self.accuracy.json(),
            "pass_at": {str(k): figure.json() for k, figure in self.pass_at.items()},
            "majority_at": {str(k): figure.json() for k, figure in self.majority_at.items()},
            "categories": {name: figures.json() for name, figures in self.categories.items()},
        }


def figures_of(evaluated: Evaluated) -> dict[str, Figures]:
    """Return the figures of each set of an evaluation."""
    figures = {}
    for name, facts in evaluated.sets.items():
        records = [record for record in evaluated.records if record.set == name]
        categories = sorted({record.category for record in records}) if facts.category is not None else []
        by_category = {each: _figures([r for r in records if r.category == each], facts) for each in categories}
        figures[name] = _figures(records, facts, by_category)
    return figures


def mean_reward(record: Record) -> float:
    """Return the mean reward of the answers to a prompt."""
    return sum(answer.reward for answer in record.answers) / len(record.answers)


def passed(record: Record, facts: SetFacts) -> list[bool]:
    """Return which answers to a prompt pass; missing ones do not."""
    assert facts.passes is not None  # noqa: S101 figures of sets where nothing can pass do not ask
    # Rewards are float32: the one for 0.7 is a little below 0.7.
    least = float(np.float32(facts.passes))
    answers = [answer.reward >= least for answer in record.answers]
    return answers + [False] * (facts.samples - len(answers))


def _figures(records: Sequence[Record], facts: SetFacts, categories: dict[str, Figures] | None = None) -> Figures:
    scored = [record for record in records if record.answers]
    failed = len(records) - len(scored)
    if not scored:
        return Figures(0, failed, None, None, categories=categories or {})
    rewards = [mean_reward(record) for record in scored]
    reward = Figure(sum(rewards) / len(rewards), mean_interval(rewards))
    if facts.passes is None:
        return Figures(len(scored), failed, reward, None, categories=categories or {})
    of_prompts = partial(_share, scored)
    return Figures(
        rows=len(scored),
        failed=failed,
        reward=reward,
        accuracy=of_prompts(lambda record: _pass(record, facts, 1)),
        pass_at={k: of_prompts(lambda record, k=k: _pass(record, facts, k)) for k in facts.ks},  # type: ignore[misc]
        majority_at={k: of_prompts(lambda record, k=k: _vote(record, facts, k)) for k in facts.ks},  # type: ignore[misc]
        categories=categories or {},
    )


def _share(records: Sequence[Record], probability: Callable[[Record], float]) -> Figure:
    share = min(1.0, sum(map(probability, records)) / len(records))
    return Figure(share, wilson(share, len(records)))


def _pass(record: Record, facts: SetFacts, k: int) -> float:
    each = passed(record, facts)
    return pass_at_k(len(each), sum(each), k)


def _vote(record: Record, facts: SetFacts, k: int) -> float:
    each = passed(record, facts)
    votes = [answer.vote for answer in record.answers]
    return majority_at_k(votes + [""] * (len(each) - len(votes)), each, k)
