"""What a row with failed or cut-off episodes becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from broker.store import Store
from broker.subjects import RowId
from relax_actors.config.environment import EnvironmentSection
from relax_actors.errors import EpisodesFailedError
from relax_actors.messages import DropReason, FinishReason, Trajectory
from relax_actors.rewards import environment
from relax_actors.rewards.loading import call_reward, load_reward
from relax_actors.runtime import Drop, Row
from relax_actors.training.episode_group import EpisodeGroup, Live
from tests.unit.test_episode import answer, episode, write

ENDS = FinishReason.ENV_DONE, FinishReason.ERROR, FinishReason.MAX_TURNS


def group(tmp_path: Path, ends: tuple[FinishReason, ...] = ENDS, kind: str = "group") -> EpisodeGroup:
    """Build a row with an episode of one turn and reward 0.5 for each end."""
    found = EpisodeGroup(Row(RowId(3, 1, kind), {}, Store(tmp_path)), None, 0.0)  # type: ignore[arg-type]
    for reason in ends:
        one = episode()
        one.observe(answer())
        write(one, "x")
        one.observe(answer("b", reward=0.5, metrics={"picks": 1.0} if reason == FinishReason.ENV_DONE else {}))
        one.end(reason)
        found.members.append(Live(one, found, failure="environment: it broke" if reason == FinishReason.ERROR else ""))
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
    assert str(caught.value) == "the environment failed in all 2 samples of group.3.1: environment: it broke"


def test_a_reward_function_reads_the_conversation_if_it_asks_for_the_sample(tmp_path: Path) -> None:
    found = result(group(tmp_path))
    assert isinstance(found, Trajectory)
    for path, expected in ((f"{__name__}.answers", 1.0), (f"{__name__}.length", 1.0)):
        reward = load_reward(path)
        assert call_reward(reward, "x", None, found.samples[0]) == expected  # type: ignore[arg-type]


def answers(completion: str, prompt: object, sample: Any) -> float:
    """Count what the model said."""
    del completion, prompt
    return float(sum(message["role"] == "assistant" for message in sample.messages))


def length(completion: str, prompt: object) -> float:
    """Count characters."""
    del prompt
    return float(len(completion))
