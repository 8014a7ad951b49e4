"""Comparisons of evaluations, paired by prompt."""

from __future__ import annotations

import numpy as np
import pytest

from relax_actors.errors import ConfigError
from relax_actors.evaluation.comparison import bootstrap, compare
from relax_actors.evaluation.records import Answer, Evaluated, Record, SetFacts


def evaluated(rewards: dict[str, list[float]], *, run: str = "a", category: str | None = None) -> Evaluated:
    records = [
        Record(f"eval.0.{i}", "sums", prompt[0] if category else "", prompt, "1", [Answer("", r) for r in own])
        for i, (prompt, own) in enumerate(rewards.items())
    ]
    return Evaluated(run, 0, "", {"sums": SetFacts(category=category)}, records)


def test_prompts_are_paired_whatever_their_order_and_those_without_answers_are_left_out() -> None:
    first = evaluated({"p": [1.0], "q": [0.0], "r": [1.0], "s": [0.5]})
    second = evaluated({"s": [], "q": [1.0], "p": [0.0], "r": [1.0], "t": [1.0]})
    found = compare(first, second)["sums"]
    assert found.prompts == 3
    assert (found.reward.first, found.reward.second, found.reward.value) == pytest.approx((2 / 3, 2 / 3, 0.0))
    assert found.changed == (1, 1)
    assert found.p == 1.0


def test_equal_prompts_are_paired_in_their_order() -> None:
    first = evaluated({"p": [1.0]})
    twice = Evaluated(
        "b", 0, "", first.sets, [first.records[0], Record("eval.0.9", "sums", "", "p", "1", [Answer("", 0)])]
    )
    assert compare(twice, twice)["sums"].prompts == 2
    assert compare(first, twice)["sums"].reward.value == 0.0


def test_interval_of_a_difference_is_that_of_paired_prompts() -> None:
    source = np.random.default_rng(7)
    prompts = {f"p{i}": [float(x)] for i, x in enumerate(source.normal(0, 10, 400))}
    better = {
        name: [own[0] + 0.5 + float(noise)]
        for (name, own), noise in zip(prompts.items(), source.normal(0, 1, 400), strict=True)
    }
    low, high = compare(evaluated(prompts), evaluated(better))["sums"].reward.interval
    differences = np.array([better[name][0] - own[0] for name, own in prompts.items()])
    assert low < differences.mean() < high
    error = differences.std(ddof=1) / 20
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.05)
    assert bootstrap(differences) == bootstrap(differences)


def test_categories_are_compared_apart() -> None:
    first = evaluated({"a1": [0.0], "a2": [0.0], "b1": [1.0]}, category="letter")
    second = evaluated({"a1": [1.0], "a2": [1.0], "b1": [1.0]}, category="letter")
    parts = compare(first, second)["sums"].categories
    assert {name: (part.prompts, part.reward.value) for name, part in parts.items()} == {"a": (2, 1.0), "b": (1, 0.0)}


def test_runs_without_a_common_prompt_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a@0 .* and b@0 .* share no prompt"):
        compare(evaluated({"p": [1.0]}), evaluated({"q": [1.0]}, run="b"))


def test_several_answers_have_no_mcnemar_test() -> None:
    found = compare(evaluated({"p": [1.0, 0.0]}), evaluated({"p": [1.0, 1.0]}))["sums"]
    assert (found.changed, found.p) == (None, None)
    assert found.accuracy is not None
    assert found.accuracy.value == 0.5
