"""Players of an episode when environments fail or return nonsense, and rows that do not fit the run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.codec import decode, encode
from broker.store import Store
from broker.subjects import RowId
from relax_actors.algorithms.advantages.estimation import RowEstimation
from relax_actors.config import load_config
from relax_actors.config.environment import EnvironmentSection
from relax_actors.data.renderer import Extension
from relax_actors.envs import Step
from relax_actors.envs.observation import EnvironmentFaultError, answer_of
from relax_actors.errors import RowError
from relax_actors.messages import EnvironmentAnswer, FinishReason, Reward, Trajectory
from relax_actors.rewards.credit import environment_reward
from relax_actors.runtime import Drop, Row
from relax_actors.sessions.episode import Episode
from relax_actors.sessions.episode_group import EpisodeGroup
from relax_actors.sessions.episode_start import Limits, Start
from tests.support.messages import assert_says
from tests.unit.test_episode import PROMPT, Letters, answer, write
from tests.unit.test_players import PICK, PLAYERS, SETTINGS, duel, episode, play, played

NO_PROMPT = np.zeros(0, np.int32)


def group_of(folder: Path, *episodes: Episode, kind: str = "group") -> EpisodeGroup:
    found = EpisodeGroup(Row(RowId(3, 1, kind), {}, Store(folder)), None, 0.0)  # type: ignore[arg-type]
    found.members += episodes
    return found


def result(group: EpisodeGroup, **settings: Any) -> Trajectory | Drop:
    return group.result(EnvironmentSection.model_validate({"name": "x.Y", "players": PLAYERS, **settings}), {})


def dueled(reason: FinishReason, trained: tuple[str, ...] = PLAYERS) -> Episode:
    """Both players act, and get rewards; then the episode ends."""
    one = episode(trained=trained)
    play(one, [("", "", "x", {}), ("critic", "ab", "yz", {"solver": 1.0, "critic": 0.5})])
    one.end(reason)
    return one


def test_a_failed_sample_that_is_trained_has_no_reward_for_any_player(tmp_path: Path) -> None:
    found = result(group_of(tmp_path, dueled(FinishReason.ENV_DONE), dueled(FinishReason.ERROR)), on_error="zero")
    assert isinstance(found, Trajectory)
    reward = environment_reward(found, "episode", 1.0, PLAYERS)
    assert reward.values.tolist() == [1.5, 0.0]
    assert {name: values.tolist() for name, values in reward.components.items()} == {
        "solver": [1.0, 0.0],
        "critic": [0.5, 0.0],
    }
    assert environment_reward(found, "turn", 1.0, PLAYERS).values.tolist() == [1.5, 0.0]


def test_a_sample_that_failed_before_its_prompt_belongs_to_the_first_player(tmp_path: Path) -> None:
    starts = [Start(RowId(0, 0), n, 5, NO_PROMPT, (), PLAYERS, PLAYERS) for n in range(2)]
    episodes = [Episode(start, Limits(4, 5, 60), Letters()) for start in starts]
    episodes[1].step(answer("ab"))
    write(episodes[1], "x")
    for one, reason in zip(episodes, (FinishReason.ERROR, FinishReason.TIMEOUT), strict=True):
        one.end(reason)
    found = result(group_of(tmp_path, *episodes), on_error="zero", prompt="environment")
    assert isinstance(found, Trajectory)
    assert (found.players, found.trained_lengths.tolist()) == (["solver", "solver"], [0, 1])


def test_held_out_rows_count_whoever_has_acted(tmp_path: Path) -> None:
    one = episode(trained=("critic",))
    play(one, [("", "", "x", {"critic": 0.5})])
    found = result(group_of(tmp_path, one, kind="eval"), trained=["critic"])
    assert isinstance(found, Trajectory), "its reward would be missing in the evaluation"
    assert found.metrics["environment_reward"] == [0.5]
    training = result(group_of(tmp_path, one), trained=["critic"])
    assert isinstance(training, Drop)


def test_an_empty_prompt_fails_the_sample_with_the_reason() -> None:
    one = Episode(Start(RowId(0, 0), 0, 5, NO_PROMPT, (), PLAYERS, PLAYERS), Limits(4, 5, 60), Letters())
    one.step(answer("ab"))
    write(one, "x")
    error = (
        'the first one of player critic is empty, but it is the prompt with environment.prompt = "environment"; '
        "return a text"
    )
    with pytest.raises(RowError, match=f"^{re.escape(error)}$"):
        one.step(answer("", player="critic"))


class Recorder(Letters):
    """Keeps the last history that it was given."""

    history: tuple[Any, ...] = ()

    def extend(self, history: Any, answer: Any, new: Any) -> Extension:
        self.history = tuple(message["content"] for message in history)
        return super().extend(history, answer, new)


def test_an_answer_that_nothing_was_said_to_stays_in_the_conversation() -> None:
    conversation = Recorder()
    one = Episode(Start(RowId(0, 0), 0, 5, PROMPT, [{"role": "user", "content": "p"}]), Limits(4, 5, 60), conversation)
    for seen, said in (("", "x"), ("", "y"), ("b", "z")):
        one.step(answer(seen))
        write(one, said)
    assert conversation.history == ("p", "x")
    one.step(answer("c"))
    assert conversation.history == ("p", "x", "y", "b")
    assert one.reading is not None


WRONG_PLAYERS = [0, None, b"solver", ["solver"], np.array(PLAYERS)]


@pytest.mark.parametrize("player", WRONG_PLAYERS, ids=lambda player: type(player).__name__)
def test_a_player_that_is_no_text_is_refused(player: Any) -> None:
    error = f"step() returned Step(player={player!r:.80}); player is a name, or empty for the same player"
    with pytest.raises(EnvironmentFaultError, match=f"^{re.escape(error)}$"):
        answer_of(Step("a", player=player), "s", 0, 100, PLAYERS)


def test_names_from_numpy_are_names() -> None:
    found = answer_of(Step("a", {np.str_("solver"): 1.0}, player=np.str_("critic")), "s", 0, 100, PLAYERS)
    assert decode(encode(found, "test"), EnvironmentAnswer) == found


def test_trained_players_are_named_once_and_players_are_few() -> None:
    with pytest.raises(Exception, match=re.escape("environment.trained names a player twice: critic, critic")):
        load_config(PICK, [*SETTINGS, "environment.trained=['critic', 'critic']"])
    with pytest.raises(Exception, match=r"environment\.players.*at most 64 items"):
        load_config(PICK, [f"environment.players={[f'p{n}' for n in range(10_000)]}"])


def test_a_player_that_acts_in_one_sample_alone_is_no_signal() -> None:
    settings = [*SETTINGS, "environment.credit=turn", "algorithm.shaping.filter_zero_variance=true"]
    alone = played(("", "", "x", {}))
    trajectory = Trajectory.of(PROMPT, [duel(0.0, 1.0), alone, alone])
    reward = environment_reward(trajectory, "turn", 0.5, PLAYERS)
    why = RowEstimation(load_config(PICK, settings)).without_signal(reward, {"trajectory": trajectory})
    assert_says(why, "player", "3 samples")


def test_a_row_of_players_whose_samples_were_all_cut_off_is_dropped() -> None:
    shaping = ["algorithm.shaping.filter_zero_variance=true", "algorithm.shaping.mask_truncated=true"]
    samples = [replace(duel(reward, 0.0), finish_reason=FinishReason.LENGTH) for reward in (0.0, 1.0)]
    trajectory = Trajectory.of(PROMPT, samples)
    reward = environment_reward(trajectory, "episode", 1.0, PLAYERS)
    why = RowEstimation(load_config(PICK, [*SETTINGS, *shaping])).without_signal(reward, {"trajectory": trajectory})
    assert_says(why, "all 2 samples", "rollout.max_tokens")


def test_columns_that_do_not_fit_a_row_of_players_are_row_errors() -> None:
    settings = [
        "algorithm.kl.place=reward",
        "algorithm.kl.coefficient=0.1",
        "algorithm.shaping.filter_zero_variance=true",
    ]
    trajectory = Trajectory.of(PROMPT, [duel(0.0, 1.0), duel(1.0, 0.0)])
    total = len(trajectory.token_ids)
    good = environment_reward(trajectory, "episode", 1.0, PLAYERS)
    short = Reward(np.zeros(1, np.float32))
    uneven = Reward(good.values, {}, np.zeros(total, np.float32), np.array([total - 1, 1], np.int32))
    fits = np.zeros(total)
    lengths = trajectory.sample_lengths.tolist()
    for reward, reference, error in (
        (short, fits, "there are 1 rewards for 2 samples"),
        (uneven, fits, f"token_values have lengths [{total - 1}, 1], samples {lengths}"),
        (good, fits[1:], f"column reference has shape [{total - 1}]; the trajectory has {total} tokens"),
    ):
        columns = {"trajectory": trajectory, "reference": reference}
        estimation = RowEstimation(load_config(PICK, [*SETTINGS, *settings]))
        assert estimation.without_signal(reward, columns) == ""
        with pytest.raises(RowError, match=f"^{re.escape(f'row: {error}')}$"):
            estimation.estimate(reward, columns, "row")


def test_players_that_are_not_those_of_the_run_are_row_errors() -> None:
    trajectory = Trajectory.of(PROMPT, [duel(0.0, 1.0)])
    for trained, said in ((("judge",), "the trained players are judge"), ((), "the run has no players")):
        error = f"the trajectory has rewards of the players critic, solver; {said}"
        with pytest.raises(RowError, match=f"^{re.escape(error)}$"):
            environment_reward(trajectory, "turn", 1.0, trained)


def test_an_episode_holds_the_conversations_of_all_players_that_have_acted() -> None:
    one = episode()
    one.step(answer())
    assert one.held == len(PROMPT)
    write(one, "xy")
    one.step(answer("abc", player="critic"))
    assert one.held == len(PROMPT) + 2 + len(PROMPT) + 3
