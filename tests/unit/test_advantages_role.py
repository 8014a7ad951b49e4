"""The role `advantages`: rewards of samples and tokens, and the components that every row of a run has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from broker.codec import encode
from broker.store import Store
from broker.subjects import RowId
from relax_actors.config import load_config
from relax_actors.errors import RowError
from relax_actors.messages import Advantage, Prompt, Reward, Trajectory
from relax_actors.roles.advantages import Advantages
from relax_actors.runtime import Drop, Row
from tests.support.running import TINY

VALUES = np.array([1.0, 0.0, 0.0, 1.0], np.float32)


KL_IN_REWARD = (
    "algorithm.kl.place=reward",
    "algorithm.kl.kind=k1",
    "algorithm.kl.coefficient=0.1",
    "roles.reference.actor=reference",
)
OWN = """
import numpy as np

def wrong_shape(group):
    return np.zeros(group.n - 1)

def not_finite(group):
    return np.full(group.n, np.nan)

def refuses(group):
    raise ValueError("this group is odd")
"""


def advantages(tmp_path: Path, value: Any, *settings: str, **columns: Any) -> Any:
    """Handle a row whose column `reward` holds a value."""
    role = Advantages()
    role.context = SimpleNamespace(config=load_config(TINY, list(settings)))  # type: ignore[assignment]
    name, *others = role.inputs(role.context.config)
    cells = {name: encode(value, "reward.0#1")} | {other: encode(columns[other], f"{other}.0#1") for other in others}
    return role.handle(Row(RowId(1, 2), cells, Store(tmp_path / "store")))


def test_rewards_of_samples_give_one_advantage_each(tmp_path: Path) -> None:
    found = advantages(tmp_path, Reward(VALUES))
    assert isinstance(found, Advantage)
    assert found.values.shape == (4,)
    assert found.reward == 0.5


def test_token_rewards_give_one_advantage_for_each_token(tmp_path: Path) -> None:
    tokens = np.zeros(8, np.float32)
    tokens[3] = 1.0
    found = advantages(tmp_path, Reward(VALUES, {}, tokens, np.full(4, 2, np.int32)))
    assert found.values.shape == (8,)
    assert found.values[2] == found.values[3]


def test_equal_rewards_are_dropped_unless_tokens_differ(tmp_path: Path) -> None:
    filtered, equal = "algorithm.shaping.filter_zero_variance=true", np.ones(4, np.float32)
    assert isinstance(advantages(tmp_path, Reward(equal), filtered), Drop)
    tokens = np.array([0.0, 0.5, 0.0, 0.0], np.float32)
    assert isinstance(advantages(tmp_path, Reward(equal, {}, tokens, np.ones(4, np.int32)), filtered), Advantage)


COMPONENTS = 'reward.components=["style", "answer"]'


def test_components_of_the_run_are_accepted_and_their_means_kept(tmp_path: Path) -> None:
    found = advantages(tmp_path, Reward(VALUES, {"answer": VALUES, "style": VALUES / 4}), COMPONENTS)
    assert found.components == {"answer": 0.5, "style": 0.125}


@pytest.mark.parametrize(
    ("advantage", "scale", "expected"),
    [
        # RLOO: each reward minus the mean of the three others.
        ("rloo", "none", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        # Dr. GRPO: each reward minus the mean of all four.
        ("group", "none", [0.75, -0.25, -0.25, -0.25]),
        ("group", "group_std", [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_advantage_and_scale_are_those_of_the_configuration(
    tmp_path: Path, advantage: str, scale: str, expected: list[float]
) -> None:
    settings = (f"algorithm.advantage={advantage}", f"algorithm.scale={scale}")
    found = advantages(tmp_path, Reward(np.array([1, 0, 0, 0], np.float32)), *settings)
    np.testing.assert_allclose(found.values, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("components", "settings"), [({"answer": VALUES}, [COMPONENTS]), ({"other": VALUES}, []), ({}, [COMPONENTS])]
)
def test_components_other_than_those_of_the_run_quarantine_the_row(
    tmp_path: Path, components: dict[str, Any], settings: list[str]
) -> None:
    with pytest.raises(RowError, match=r"column reward of group\.1\.2 has reward components .*the run has"):
        advantages(tmp_path, Reward(VALUES, components), *settings)


@pytest.mark.parametrize("value", [[1.0, float("nan")], ["x"], [], [[1.0]], {"a": 1}])
def test_column_without_one_finite_number_a_sample_quarantines_the_row(tmp_path: Path, value: Any) -> None:
    with pytest.raises(RowError, match="column shaped of group"):
        advantages(tmp_path, value, "advantages.reads=shaped")


def trajectory(lengths: list[int], reasons: list[str] | None = None) -> Trajectory:
    """Samples of these lengths, sampled with log-probs -1."""
    total = sum(lengths)
    return Trajectory(
        np.array([1, 2], np.int32),
        np.array(lengths, np.int32),
        np.arange(total, dtype=np.int32) % 9,
        np.full(total, -1.0, np.float32),
        np.zeros(total, np.int32),
        [""] * len(lengths),
        reasons or ["stop"] * len(lengths),
    )


def test_kl_is_summed_into_the_reward_of_samples_for_estimators_of_samples(tmp_path: Path) -> None:
    # k1 is 0.5 at each token, so the rewards of samples of 2, 0, 1 and 4 tokens fall by 0.1 x 0.5 each.
    settings = ("algorithm.advantage=rloo", "algorithm.scale=none", *KL_IN_REWARD)
    columns = {"trajectory": trajectory([2, 0, 1, 4]), "reference": np.full(7, -1.5, np.float32)}
    found = advantages(tmp_path, Reward(VALUES), *settings, **columns)
    totals = VALUES - 0.05 * np.array([2, 0, 1, 4])
    np.testing.assert_allclose(found.values, (totals - totals.mean()) * 4 / 3, rtol=1e-5)
    assert found.reward == 0.5


def test_kl_is_a_reward_of_tokens_for_estimators_of_tokens_and_reaches_the_critic(tmp_path: Path) -> None:
    settings = ("algorithm.advantage=gae", "algorithm.scale=none", *KL_IN_REWARD)
    values = np.array([0.25, 0.5, 9.0], np.float32)
    columns = {"trajectory": trajectory([2, 1]), "reference": np.full(3, -1.5, np.float32), "values": values}
    found = advantages(tmp_path, Reward(VALUES[:2]), *settings, **columns)
    # gamma = lambda = 1: returns are the reward and the penalties from the token on.
    np.testing.assert_allclose(found.returns, [0.9, 0.95, -0.05], rtol=1e-5)
    np.testing.assert_allclose(found.values, found.returns - values, rtol=1e-5)
    assert found.values.dtype == np.float32


def test_proximal_log_probs_of_actor_fwd_enter_the_kl(tmp_path: Path) -> None:
    settings = ("algorithm.advantage=returns", "algorithm.scale=none", "algorithm.proximal=actor_fwd", *KL_IN_REWARD)
    columns = {
        "trajectory": trajectory([1, 1]),
        "actor_fwd": np.array([-1.0, -3.5], np.float32),
        "reference": np.full(2, -1.5, np.float32),
    }
    found = advantages(tmp_path, Reward(VALUES[:2]), *settings, **columns)
    np.testing.assert_allclose(found.values, [1 - 0.05, 0.2], rtol=1e-5)


def test_log_probs_of_another_number_of_tokens_quarantine_the_row(tmp_path: Path) -> None:
    columns = {"trajectory": trajectory([1, 1]), "reference": np.zeros(3, np.float32)}
    with pytest.raises(RowError, match=r"^column reward of group\.1\.2: 2 and 3 log-probs for 2 tokens"):
        advantages(tmp_path, Reward(VALUES[:2]), "algorithm.scale=none", *KL_IN_REWARD, **columns)


def test_greedy_sample_is_the_baseline_and_gets_no_advantage(tmp_path: Path) -> None:
    settings = ("algorithm.advantage=greedy", "algorithm.scale=none")
    found = advantages(tmp_path, Reward(np.array([1.0, 0.0, 0.25], np.float32)), *settings)
    assert found.values.tolist() == [0.75, -0.25, 0.0]
    assert found.reward == 0.5
    filtered = (*settings, "algorithm.shaping.filter_zero_variance=true")
    found = advantages(tmp_path, Reward(np.array([1, 1, 0], np.float32)), *filtered)
    assert found.values.tolist() == [1.0, 1.0, 0.0]
    found = advantages(tmp_path, Reward(np.array([1, 1, 1], np.float32)), *filtered)
    assert found == Drop("no_signal", "the advantages of all samples are 0")


def test_statistics_of_the_step_get_unrounded_numbers(tmp_path: Path) -> None:
    found = advantages(tmp_path, Reward(VALUES / 3), "algorithm.scale=batch_std")
    assert (found.values.dtype, found.rewards.dtype) == (np.float64, np.float64)
    np.testing.assert_array_equal(found.rewards, (VALUES / 3).astype(np.float64))


def test_role_of_the_task_names_the_running_mean(tmp_path: Path) -> None:
    prompt = Prompt("", np.array([1], np.int32), "", {"role": "white"}, 0, 0)
    found = advantages(tmp_path, Reward(VALUES), "algorithm.advantage=ema", "algorithm.scale=none", prompt=prompt)
    assert found.role == "white"
    assert found.values.tolist() == VALUES.tolist()


def test_penalties_of_length_change_rewards(tmp_path: Path) -> None:
    settings = ("rollout.max_tokens=4", "algorithm.scale=none", "algorithm.advantage=reward")
    overlong = ("algorithm.shaping.overlong=true", "algorithm.shaping.overlong_buffer=2")
    columns = {"trajectory": trajectory([1, 2, 3, 4])}
    # DAPO: 0 up to 2 tokens, then linear to -1 at 4.
    found = advantages(tmp_path, Reward(VALUES), *settings, *overlong, **columns)
    assert found.values.tolist() == [1.0, 0.0, -0.5, 0.0]
    found = advantages(tmp_path, Reward(VALUES), *settings, "algorithm.shaping.length_penalty=0.5", **columns)
    # 0.5 x mean reward 0.5 x length / 4.
    np.testing.assert_allclose(found.values, VALUES - 0.25 * np.array([1, 2, 3, 4]) / 4, rtol=1e-6)
    assert found.reward == 0.5


def test_decoupled_components_have_the_weights_of_the_table_unless_others_are_set(tmp_path: Path) -> None:
    parts = {"exact_match": VALUES, "tiny_tasks.share_of_sevens": VALUES[::-1].copy() * 9}
    table = 'reward.function={"exact_match" = 1.0, "tiny_tasks.share_of_sevens" = 0.5}'
    settings = ("algorithm.components=decoupled", table)
    one = (VALUES - 0.5) / (VALUES.std(ddof=1) + 1e-6)
    found = advantages(tmp_path, Reward(VALUES, parts), *settings)
    np.testing.assert_allclose(found.values, one + 0.5 * one[::-1], rtol=1e-5)
    found = advantages(tmp_path, Reward(VALUES, parts), *settings, "algorithm.weights={exact_match = 3.0}")
    np.testing.assert_allclose(found.values, 3 * one + 0.5 * one[::-1], rtol=1e-5)


def test_components_that_cancel_in_the_sum_are_a_signal(tmp_path: Path) -> None:
    table = 'reward.function={"exact_match" = 1.0, "tiny_tasks.share_of_sevens" = 0.5}'
    settings = ("algorithm.components=decoupled", table, "algorithm.shaping.filter_zero_variance=true")
    first = np.array([1.0, 0.0, 1.0, 0.5], np.float32)
    parts = {"exact_match": first, "tiny_tasks.share_of_sevens": 2 - 2 * first}
    found = advantages(tmp_path, Reward(np.ones(4, np.float32), parts), *settings)
    np.testing.assert_allclose(found.values, [0.39, -0.65, 0.39, -0.13], atol=0.005)
    flat = {name: np.ones(4, np.float32) for name in parts}
    found = advantages(tmp_path, Reward(VALUES, flat), *settings)
    assert found == Drop("no_signal", "the advantages of all samples are 0")


def test_a_tie_for_the_best_of_a_group_is_no_signal(tmp_path: Path) -> None:
    settings = ("algorithm.name=passk", "algorithm.shaping.filter_zero_variance=true")
    found = advantages(tmp_path, Reward(VALUES), *settings)
    assert found == Drop("no_signal", "the advantages of all samples are 0")


def test_episodes_are_overlong_by_their_token_budget(tmp_path: Path) -> None:
    settings = ("algorithm.scale=none", "algorithm.advantage=reward", "algorithm.shaping.overlong=true")
    budget = ("environment.name=tests.support.environments.Echo", "environment.token_budget=10", "rollout.max_tokens=2")
    columns = {"trajectory": trajectory([8, 9, 10, 12])}
    # A fifth of 10 tokens is the buffer; beyond the budget the penalty stays at 1.
    found = advantages(tmp_path, Reward(VALUES), *settings, *budget, **columns)
    assert found.values.tolist() == [1.0, -0.5, -1.0, 0.0]


def test_rows_whose_samples_were_all_cut_off_are_dropped_if_those_are_masked(tmp_path: Path) -> None:
    masked = "algorithm.shaping.mask_truncated=true"
    columns = {"trajectory": trajectory([1, 2], ["length", "length"])}
    found = advantages(tmp_path, Reward(VALUES[:2]), masked, **columns)
    assert found == Drop("no_signal", "all 2 samples were cut off at rollout.max_tokens and are masked")
    columns = {"trajectory": trajectory([1, 2], ["length", "stop"])}
    assert isinstance(advantages(tmp_path, Reward(VALUES[:2]), masked, **columns), Advantage)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "wrong_shape",
            r"'own_advantage\.wrong_shape' returned float64\[3\]; it must return \[4\], one number per sample$",
        ),
        ("not_finite", r"'own_advantage\.not_finite' returned nan at index 0 of 4; it must return finite numbers$"),
        ("refuses", r"column reward of group\.1\.2: this group is odd$"),
    ],
)
def test_bad_result_of_a_users_estimator_quarantines_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, message: str
) -> None:
    (tmp_path / "own_advantage.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RowError, match=message):
        advantages(tmp_path, Reward(VALUES), f"algorithm.advantage=own_advantage.{function}")


@pytest.mark.parametrize(("name", "values", "per_token"), [("rloo", [1.0, -1.0], False), ("returns", [1.0, 1.0], True)])
def test_a_row_with_as_many_tokens_as_samples_says_what_its_advantages_are_of(
    tmp_path: Path, name: str, values: list[float], *, per_token: bool
) -> None:
    settings = (f"algorithm.advantage={name}", "algorithm.scale=none", "algorithm.shaping.mask_truncated=true")
    found = advantages(tmp_path, Reward(np.array([1.0, 0.0], np.float32)), *settings, trajectory=trajectory([2, 0]))
    np.testing.assert_array_equal(found.values, np.array(values, np.float32))
    assert found.per_token is per_token


def test_kl_in_the_reward_is_clamped(tmp_path: Path) -> None:
    settings = ("algorithm.advantage=returns", "algorithm.scale=none", *KL_IN_REWARD, "algorithm.kl.clamp=0.25")
    columns = {"trajectory": trajectory([1, 1, 1, 1]), "reference": np.array([-1.5, -0.5, -1.125, -9], np.float32)}
    found = advantages(tmp_path, Reward(VALUES), *settings, **columns)
    np.testing.assert_allclose(found.values, VALUES - 0.1 * np.array([0.25, -0.25, 0.125, 0.25]), rtol=1e-6)


def test_imitated_samples_have_the_correct_reward_in_float32(tmp_path: Path) -> None:
    rewards = np.array([0.9, 0.5, 0.95, 0.0], np.float32)
    found = advantages(tmp_path, Reward(rewards), "algorithm.positive_nll=0.1", "algorithm.correct_reward=0.9")
    assert found.correct.tolist() == [True, False, True, False]
