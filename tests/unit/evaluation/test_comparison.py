"""Comparisons of evaluations, paired by prompt."""

from __future__ import annotations

import numpy as np
import pytest

from relax_actors.errors import ConfigError
from relax_actors.evaluation.comparison import MOST_RESAMPLED, bootstrap, compare
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
    assert bootstrap(differences) == bootstrap(differences) == bootstrap(differences, differences)[:1] == [(low, high)]


def test_an_interval_of_many_prompts_is_bounded_in_work_and_one_prompt_has_none() -> None:
    differences = np.random.default_rng(3).exponential(1, MOST_RESAMPLED + 1)
    (resampled,) = bootstrap(differences[1:])
    (computed,) = bootstrap(differences)
    assert computed == pytest.approx(resampled, abs=2e-3)
    found = compare(evaluated({"p": [1.0]}), evaluated({"p": [0.0]}))["sums"]
    assert (found.reward.value, found.reward.interval, found.json()["reward"]["interval"]) == (-1.0, None, None)


def test_pairs_of_answers_have_a_mcnemar_test() -> None:
    first = evaluated({"p": [0.0, 0.0], "q": [1.0, 1.0], "r": [0.0, 0.0]})
    found = compare(first, evaluated({"p": [1.0, 1.0], "q": [1.0, 1.0], "r": [1.0, 1.0]}))["sums"]
    assert (found.changed, found.p) == ((2, 0), 0.5)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (SetFacts(passes=0.5), r"passes is 1.0 in A and 0.5 in B"),
        (SetFacts(reward="numeric_match"), r"reward is 'exact_match' in A and 'numeric_match' in B"),
    ],
)
def test_sets_with_other_rewards_or_passes_are_refused(facts: SetFacts, message: str) -> None:
    first = evaluated({"p": [1.0]})
    with pytest.raises(ConfigError, match=message):
        compare(first, Evaluated("b", 0, "", {"sums": facts}, first.records))


def test_categories_are_compared_apart() -> None:
    first = evaluated({"a1": [0.0], "a2": [0.0], "b1": [1.0]}, category="letter")
    second = evaluated({"a1": [1.0], "a2": [1.0], "b1": [1.0]}, category="letter")
    parts = compare(first, second)["sums"].categories
    assert {name: (part.prompts, part.reward.value) for name, part in parts.items()} == {"a": (2, 1.0), "b": (1, 0.0)}


def test_runs_without_a_common_prompt_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a@0 .* and b@0 .* share no prompt.* chat template"):
        compare(evaluated({"p": [1.0]}), evaluated({"q": [1.0]}, run="b"))


def test_several_answers_have_no_mcnemar_test() -> None:
    found = compare(evaluated({"p": [1.0, 0.0]}), evaluated({"p": [1.0, 1.0]}))["sums"]
    assert (found.changed, found.p) == (None, None)
    assert found.accuracy is not None
    assert found.accuracy.value == 0.5
