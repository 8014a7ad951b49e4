"""Credit of turns: a turn competes with the turns of the same number, not with easier or harder ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from relax_actors.algorithms.advantages.baselines import group as by_sample
from relax_actors.algorithms.advantages.estimation import RowEstimation
from relax_actors.algorithms.advantages.groups import Array, Group
from relax_actors.algorithms.advantages.turns import turn
from relax_actors.algorithms.function_check import notes
from relax_actors.algorithms.refusals import refusals
from relax_actors.config import load_config
from relax_actors.messages import FinishReason, Sample, TokenSequence, Trajectory
from relax_actors.rewards.credit import environment_reward

PICK = Path(__file__).parents[2] / "examples" / "agents" / "pick.toml"
PROMPT = np.array([1, 2], np.int32)


def row(rewards: list[list[float]]) -> Trajectory:
    """Samples whose turns are two tokens each; the environment answers every second turn with a token."""
    samples = []
    for own in rewards:
        mask = [False, False]
        spans = []
        for k in range(len(own)):
            spans.append([len(mask), len(mask) + 2])
            mask += [True, True] + [False] * (k % 2)
        trained = np.array(mask)
        count = len(mask)
        sequence = TokenSequence(
            np.concatenate([PROMPT, np.arange(count - 2, dtype=np.int32)]),
            trained,
            np.where(trained, -0.5, 0.0).astype(np.float32),
            np.where(trained, 3, -1).astype(np.int32),
            np.array(spans, np.int32),
        )
        samples.append(Sample((sequence,), "", FinishReason.STOP, turn_rewards=np.array(own, np.float32)))
    return Trajectory.of(PROMPT, samples)


def advantages(rewards: list[list[float]], discount: float = 0.0, advantage: str = "group") -> list[list[float]]:
    """Advantages of the turns of a run with `environment.credit = "turn"`."""
    trajectory = row(rewards)
    estimation = RowEstimation(load_config(PICK, ["environment.credit=turn", f"algorithm.advantage={advantage}"]))
    columns = {"trajectory": trajectory}
    values: Array = estimation.estimate(environment_reward(trajectory, "turn", discount), columns, "row").values
    by_tokens = values[trajectory.trained].reshape(-1, 2)
    assert (by_tokens[:, 0] == by_tokens[:, 1]).all()
    assert not values[~trajectory.trained].any()
    found = iter(by_tokens[:, 0].tolist())
    return [[next(found) for _ in sample] for sample in rewards]


def test_turns_compete_with_the_turns_of_the_same_number() -> None:
    # The first turn is hard, the third one easy: nobody gets credit for that alone.
    found = np.array(advantages([[0, 0, 1], [0, 0, 1], [0, 1, 1], [0, 1, 1]]))
    by = np.sqrt(4 * 0.25 / (12 - 3))
    np.testing.assert_allclose(found, np.array([[0, -0.5, 0], [0, -0.5, 0], [0, 0.5, 0], [0, 0.5, 0]]) / by, rtol=1e-4)


def test_all_turns_of_a_group_compete_if_set() -> None:
    """Returns 1, 0, 0, 1, 1, 0: mean 1/2, standard deviation sqrt(6 / 4 / 5)."""
    found = advantages([[1, 0], [0], [1, 1, 0]], advantage="all_turns")
    assert [len(sample) for sample in found] == [2, 1, 3]
    by = np.sqrt(0.3)
    expected = np.array([0.5, -0.5, -0.5, 0.5, 0.5, -0.5]) / by
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-4)
    discounted = advantages([[0, 1], [0.5]], discount=0.5, advantage="all_turns")
    # Returns 0 + 0.5 x 1, 1 and 0.5: mean 2/3, standard deviation sqrt((1/36 + 1/9 + 1/36) / 2) = 1/sqrt(12).
    np.testing.assert_allclose(np.concatenate(discounted), np.array([-1, 2, -1]) / 6 * np.sqrt(12), rtol=1e-4)
    assert advantages([[0.1], [0.1, 0.1]], advantage="all_turns") == [[0.0], [0.0, 0.0]]


def test_check_names_the_advantage_of_turn_credit() -> None:
    (note,) = notes(load_config(PICK, ["environment.credit=turn"]))
    assert note == (
        'environment.credit = "turn": algorithm.advantage = "turn" takes the place of "group" and compares a turn with '
        'those of the same number in the group; set "all_turns" to compare it with all of the group'
    )
    assert list(notes(load_config(PICK, ["environment.credit=turn", "algorithm.advantage=all_turns"]))) == []


def test_returns_to_go_are_compared_after_their_discount() -> None:
    found = np.array(advantages([[1, 0, 0.5], [0, 0, 0.5]], discount=0.5))
    assert found[0, 0] == -found[1, 0] > 0
    assert not found[:, 1:].any()


def test_episodes_of_one_turn_get_the_advantages_of_their_samples() -> None:
    rewards = [0.0, 1.0, 1.0, 0.25]
    expected = by_sample(Group(rewards=np.array(rewards)))
    np.testing.assert_allclose(np.array(advantages([[r] for r in rewards]))[:, 0], expected, rtol=1e-5)


def test_turns_that_one_sample_alone_reached_and_equal_turns_have_no_advantage() -> None:
    assert advantages([[0.1], [0.1, 0.1, 0.7], [0.1, 0.1]]) == [[0.0], [0.0, 0.0, 0.0], [0.0, 0.0]]


def test_reward_of_a_row_is_what_the_environment_gave() -> None:
    rewards = environment_reward(row([[0.5, 0.25], [1.0]]), "turn", 0.0)
    assert rewards.values.tolist() == [0.75, 1.0]


def test_without_a_scale_the_differences_are_not_divided() -> None:
    group = Group(
        rewards=np.array([1.0, 3.0]),
        lengths=np.array([2, 2]),
        token_rewards=np.array([0.0, 0.0, -2.0, 0.0]),
        turns=np.array([0, 1, 0, 1]),
    )
    assert turn(group, scale="none").tolist() == [0.0, -1.0, 0.0, 1.0]


def test_estimators_with_one_baseline_a_sample_are_refused() -> None:
    config = load_config(PICK, ["environment.credit=turn", "algorithm.advantage=rloo", "algorithm.scale=none"])
    message = (
        'environment.credit = "turn" gives every turn its own return, which algorithm.advantage = "rloo" would compare '
        'with whole samples; set algorithm.advantage = "turn" or "all_turns", or environment.credit = "episode"'
    )
    assert list(refusals(config)) == [message]
    for advantage in ("turn", "group", "returns", "reward"):
        config = load_config(PICK, ["environment.credit=turn", f"algorithm.advantage={advantage}"])
        assert list(refusals(config)) == []
        assert config.algorithm.advantage == {"group": "turn"}.get(advantage, advantage)
