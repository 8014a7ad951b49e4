"""Settings, rows and steps of players that are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from broker.subjects import RowId
from relax_actors.algorithms.advantages.estimation import RowEstimation
from relax_actors.algorithms.refusals import refusals
from relax_actors.config import load_config
from relax_actors.envs import Step
from relax_actors.envs.observation import EnvironmentFaultError, answer_of
from relax_actors.errors import RowError
from relax_actors.messages import FinishReason, Trajectory
from relax_actors.rewards.credit import environment_reward
from relax_actors.sessions.episode import Episode
from relax_actors.sessions.episode_start import Limits, Start
from tests.unit.test_episode import PROMPT, Letters, answer, write
from tests.unit.test_players import PICK, PLAYERS, SETTINGS, episode


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["algorithm.name=hierarchical_grpo"], "set algorithm.rivals to their names"),
        (["algorithm.rivals=['solver', 'judge']"], "algorithm.rivals names 'judge'.*solver, critic"),
        (["algorithm.rivals=['solver', 'critic']", "environment.trained=['solver']"], "names 'critic'.*solver"),
        (["algorithm.rivals=['solver']"], "nobody to compare with"),
    ],
)
def test_rivals_that_cannot_be_compared_are_refused(settings: list[str], says: str) -> None:
    found = [*refusals(load_config(PICK, [*SETTINGS, *settings]))]
    assert any(re.search(says, line) for line in found), found


def test_a_row_without_players_is_refused_in_a_run_with_players() -> None:
    one = Episode(Start(RowId(0, 0), 0, 7, PROMPT), Limits(8, 5, 60), Letters())
    one.step(answer())
    write(one, "x")
    one.end(FinishReason.STOP)
    trajectory = Trajectory.of(PROMPT, [one.sample()])
    reward = environment_reward(trajectory, "episode", 1.0)
    error = "row: the run has players, but no sequence of the trajectory names a player"
    with pytest.raises(RowError, match=f"^{re.escape(error)}$"):
        RowEstimation(load_config(PICK, SETTINGS)).estimate(reward, {"trajectory": trajectory}, "row")


def test_a_player_that_the_run_does_not_have_fails_the_sample() -> None:
    for fields in ({"player": "judge"}, {"rewards": {"judge": 1.0}}):
        one = episode()
        error = "the environment names the player 'judge'; environment.players are solver, critic"
        with pytest.raises(RowError, match=f"^{re.escape(error)}$"):
            one.step(answer("a", -1, **fields))


WRONG_STEPS = [
    (Step("a", player="judge"), PLAYERS, "step() names the player 'judge'; environment.players are solver, critic"),
    (Step("a", {"judge": 1.0}), PLAYERS, "step() names the player 'judge'; environment.players are solver, critic"),
    (Step("a", player="solver"), (), "step() names the player 'solver'; environment.players is not set"),
    (
        Step("a", {"solver": float("nan")}),
        PLAYERS,
        "step() returned reward of solver nan; return a finite number of at most 1e+30",
    ),
]


@pytest.mark.parametrize(("step", "players", "error"), WRONG_STEPS)
def test_a_step_with_a_wrong_player_is_refused(step: Step, players: tuple[str, ...], error: str) -> None:
    with pytest.raises(EnvironmentFaultError, match=f"^{re.escape(error)}$"):
        answer_of(step, "s", 0, 100, players)


@pytest.mark.parametrize("reward", [0.5, {"solver": 0.5}])
def test_a_reward_of_reset_is_refused(reward: Any) -> None:
    error = f"reset() returned reward {reward}; a reward answers an action: return it from step()"
    with pytest.raises(EnvironmentFaultError, match=f"^{re.escape(error)}$"):
        answer_of(Step("a", reward), "s", -1, 100, PLAYERS)


WRONG_SETTINGS = [
    (["environment.players=['a', 'a']"], "environment.players names a player twice: a, a"),
    (["environment.trained=['b']"], "environment.trained names 'b', but environment.players is not set"),
    (
        [*SETTINGS, "environment.trained=['b']"],
        "environment.trained names 'b', but environment.players are solver, critic",
    ),
    (
        [*SETTINGS, "environment.trained=[]"],
        "environment.trained = [] trains nothing; name a player, or leave it out to train all",
    ),
]


@pytest.mark.parametrize(("given", "error"), WRONG_SETTINGS)
def test_wrong_players_in_the_configuration_are_refused(given: list[str], error: str) -> None:
    with pytest.raises(Exception, match=re.escape(error)):
        load_config(PICK, given)


@pytest.mark.parametrize(
    ("settings_", "named"),
    [
        (["algorithm.whiten=samples", "algorithm.scale=none"], 'algorithm.whiten = "samples"'),
        (["algorithm.advantage=ema"], 'algorithm.advantage = "ema"'),
        (["algorithm.name=online_dpo"], 'algorithm.surrogate = "preference"'),
    ],
)
def test_statistics_of_whole_samples_are_refused_with_players(settings_: list[str], named: str) -> None:
    lines = list(refusals(load_config(PICK, [*SETTINGS, *settings_])))
    (line,) = [line for line in lines if "environment.players" in line]
    assert line.startswith(named)
    assert "; set for example algorithm." in line
