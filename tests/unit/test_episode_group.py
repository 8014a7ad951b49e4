"""What a row with failed or cut-off episodes becomes."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.codec import decode
from broker.encoder import CellEncoder
from broker.store import Store
from broker.subjects import RowId, Subjects
from relax_actors.config.environment import EnvironmentSection
from relax_actors.errors import EpisodesFailedError
from relax_actors.messages import DropReason, FinishReason, Trajectory
from relax_actors.rewards import environment
from relax_actors.rewards.scorer import RewardScorer
from relax_actors.runtime import Drop, Row
from relax_actors.sessions.episode import Episode
from relax_actors.sessions.episode_group import EpisodeGroup
from relax_actors.sessions.episode_start import Limits, Start
from tests.support.messages import assert_says
from tests.unit.test_episode import Letters, answer, episode, write

ENDS = FinishReason.ENV_DONE, FinishReason.ERROR, FinishReason.MAX_TURNS


def group(tmp_path: Path, ends: tuple[FinishReason, ...] = ENDS, kind: str = "group") -> EpisodeGroup:
    """Build a row with an episode of one turn and reward 0.5 for each end."""
    found = EpisodeGroup(Row(RowId(3, 1, kind), {}, Store(tmp_path)), None, 0.0)  # type: ignore[arg-type]
    for reason in ends:
        one = episode()
        one.step(answer())
        write(one, "x")
        one.step(answer("b", reward=0.5, metrics={"picks": 1.0} if reason == FinishReason.ENV_DONE else {}))
        one.end(reason)
        one.failure = "environment: it broke" if reason == FinishReason.ERROR else ""
        found.members.append(one)
    return found


def result(group: EpisodeGroup, **settings: Any) -> Trajectory | Drop:
    return group.result(EnvironmentSection.model_validate({"name": "x.Y", **settings}), {})


@pytest.mark.parametrize(
    ("on_error", "rewards"), [("exclude", [0.5, 0.5]), ("refill", [0.5, 0.5]), ("zero", [0.5, 0.0, 0.5])]
)
def test_a_failed_sample_is_left_out_or_gets_no_reward(tmp_path: Path, on_error: str, rewards: list[float]) -> None:
    found = result(group(tmp_path), on_error=on_error)
    assert isinstance(found, Trajectory)
    assert found.metrics["environment_reward"] == rewards
    assert found.turn_rewards.tolist() == rewards
    assert [environment(s.text, None, s) for s in found.samples] == rewards  # type: ignore[arg-type]


def test_held_out_rows_keep_all_samples(tmp_path: Path) -> None:
    found = result(group(tmp_path, kind="eval"), mask_truncated=True)
    assert isinstance(found, Trajectory)
    assert found.metrics["environment_reward"] == [0.5, 0.0, 0.5]
    assert found.metrics["environment/picks"] == [1.0, 0.0, 0.0]
    assert found.trained_lengths.tolist() == [1, 1, 1]


def test_samples_that_were_cut_off_are_not_trained_if_masked(tmp_path: Path) -> None:
    found = result(group(tmp_path), mask_truncated=True)
    assert isinstance(found, Trajectory)
    assert found.trained_lengths.tolist() == [1, 0]
    dropped = result(group(tmp_path, (FinishReason.MAX_TURNS, FinishReason.TIMEOUT)), mask_truncated=True)
    assert dropped == Drop(DropReason.TRUNCATED, "no sample has a trained token; they ended with: max_turns, timeout")


def test_a_row_whose_samples_all_failed_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(EpisodesFailedError) as caught:
        result(group(tmp_path, (FinishReason.ERROR, FinishReason.ERROR)))
    assert_says(caught.value, "all 2 samples of group.3.1", "it broke")


def test_a_row_whose_environments_all_failed_before_the_first_turn_is_no_row_with_rewards_of_0(tmp_path: Path) -> None:
    found = group(tmp_path, ())
    for sample in range(2):
        one = Episode(Start(RowId(0, 0), sample, 5, np.zeros(0, np.int32)), Limits(4, 5, 60), Letters())
        one.end(FinishReason.ERROR)
        one.failure = "environment: no database"
        found.members.append(one)
    with pytest.raises(EpisodesFailedError) as caught:
        result(found, on_error="zero")
    assert_says(caught.value, "all 2 samples of group.3.1", "no database")


def test_a_reward_function_reads_the_conversation_if_it_asks_for_the_sample(tmp_path: Path) -> None:
    found = result(group(tmp_path))
    assert isinstance(found, Trajectory)
    for path, expected in ((f"{__name__}.answers", 1.0), (f"{__name__}.length", 1.0)):
        scorer = RewardScorer(path, "reward.function")
        assert scorer.reads_samples == path.endswith("answers")
        (total,) = asyncio.run(scorer.score(["x"], None, found.samples[:1]))  # type: ignore[arg-type]
        assert total.reward == expected


def answers(completion: str, prompt: object, sample: Any) -> float:
    """Count what the model said."""
    del completion, prompt
    return float(sum(message["role"] == "assistant" for message in sample.messages))


def length(completion: str, prompt: object) -> float:
    """Count characters."""
    del prompt
    return float(len(completion))


@pytest.mark.parametrize("kind", ["group", "eval"])
def test_a_sample_that_failed_before_the_environment_gave_the_prompt_has_that_of_another_one(
    tmp_path: Path, kind: str
) -> None:
    found = group(tmp_path, (), kind)
    for failed in (True, False):
        one = Episode(Start(RowId(0, 0), int(failed), 5, np.zeros(0, np.int32)), Limits(4, 5, 60), Letters())
        if not failed:
            one.step(answer("ab"))
            write(one, "x")
        one.end(FinishReason.ERROR if failed else FinishReason.TIMEOUT)
        found.members.append(one)
    trajectory = result(found, on_error="zero", prompt="environment")
    assert isinstance(trajectory, Trajectory)
    assert trajectory.prompt_tokens.tolist() == [97, 98]
    assert [s.token_ids.tolist() for s in trajectory.sequences] == [[97, 98], [97, 98, 120]]
    assert trajectory.trained_lengths.tolist() == [0, 1]


def test_conversations_may_be_larger_than_a_cell(tmp_path: Path) -> None:
    found = group(tmp_path)
    for one in found.members:
        one.seen[-1].messages[0]["content"] = "b" * (3 << 20)
    trajectory = result(found)
    assert isinstance(trajectory, Trajectory)
    store = Store(tmp_path)
    with closing(CellEncoder(Subjects("r"), store, "rollout.0#1", 8 << 20)) as encoder:
        data = encoder.encode("relax.r.group.3.1.trajectory", trajectory)
    assert len(data) < 1 << 20
    again = decode(data, Trajectory, store.read)
    assert [s.messages for s in again.samples] == [s.messages for s in trajectory.samples]
