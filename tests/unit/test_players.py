"""Episodes with players: each has its own tokens and rewards, and is compared with itself in the other samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker.codec import decode, encode
from broker.store import Store
from broker.subjects import RowId
from relax_actors.algorithms.advantages.baselines import group as by_sample
from relax_actors.algorithms.advantages.estimation import RowEstimation
from relax_actors.algorithms.advantages.groups import Group
from relax_actors.config import load_config
from relax_actors.config.environment import EnvironmentSection
from relax_actors.errors import RowError
from relax_actors.messages import FinishReason, Reward, Sample, SessionLog, SessionState, SessionTurn, Trajectory
from relax_actors.messages.player_parts import parts_of
from relax_actors.rewards.credit import environment_reward
from relax_actors.runtime import Row
from relax_actors.sessions.episode import Episode
from relax_actors.sessions.episode_group import EpisodeGroup
from relax_actors.sessions.episode_start import Limits, Start
from relax_actors.sessions.session_log import restore
from tests.support.messages import assert_says
from tests.support.turns import log_of
from tests.unit.test_episode import CONVERSATIONS, PROMPT, Letters, answer, write

PLAYERS = ("solver", "critic")
PICK = Path(__file__).parents[2] / "examples" / "agents" / "pick.toml"
SETTINGS = ["environment.players=['solver', 'critic']"]


def episode(conversation: Letters | None = None, trained: tuple[str, ...] = PLAYERS, **limits: Any) -> Episode:
    found = {"max_turns": 8, "max_tokens": 5, "room": 60, "token_budget": None, **limits}
    start = Start(RowId(0, 0), 2, 77, PROMPT, players=PLAYERS, trained=trained)
    return Episode(start, Limits(**found), conversation or Letters())


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, str, str, dict[str, float]]]:
    """Player, observation, answer and rewards of each turn; an empty player is the one before."""
    reward = st.dictionaries(st.sampled_from(PLAYERS), st.sampled_from([-1.0, 0.5, 1.0]))
    turn = st.tuples(
        st.sampled_from(("", *PLAYERS)), st.text("abc", max_size=6), st.text("xyz", min_size=1, max_size=5), reward
    )
    return draw(st.lists(turn, max_size=8))


def play(
    one: Episode, story: list[tuple[str, str, str, dict[str, float]]]
) -> tuple[list[SessionTurn | SessionState], list[str]]:
    """Play a story; return the turns as they are written down, and the player of each."""
    turns: list[SessionTurn | SessionState] = []
    acted: list[str] = []
    rewards: dict[str, float] = {}
    for player, seen, said, next_rewards in story:
        if one.state is not None:
            break
        one.step(answer(seen, len(turns) - 1, player=player, rewards=rewards))
        rewards = next_rewards
        if one.reading is None:
            break
        acted.append(one.player)
        turns.append(write(one, said[: one.max_tokens]))
    if (one.state, one.reading) == (None, None):
        one.step(answer("", len(turns) - 1, rewards=rewards, done=True))
    if one.state is None:
        one.end(FinishReason.TIMEOUT)
    return [*turns, one.state], acted


# The beginning of a new sequence without a message: nothing but the answer that the conversation drops.
@example([("", "", "x", {}), ("", "", "x", {})], CONVERSATIONS[1], 4, PLAYERS)
@settings(max_examples=60, deadline=None)
@given(stories(), st.sampled_from(CONVERSATIONS), st.integers(4, 40), st.sampled_from([PLAYERS, ("critic",)]))
def test_players_have_their_own_tokens_and_recorded_turns_repeat_the_episode(
    story: Any, conversation: Letters, room: int, trained: tuple[str, ...]
) -> None:
    one = episode(conversation, trained, room=room)
    turns, acted = play(one, story)
    sample = one.sample()
    for player in PLAYERS:
        own = [s for s in sample.sequences if s.player == player]
        said = "".join(action for action, by in zip(one.actions, acted, strict=True) if by == player)
        assert "".join(chr(t) for s in own for t in s.token_ids[s.sampled]) == said
        assert "".join(chr(t) for s in own for t in s.token_ids[s.loss_mask]) == (said if player in trained else "")
    rewards = one.rewards
    assert sample.metrics["environment_reward"] == sum(rewards[name] for name in trained)
    assert {name: sample.metrics[f"reward/{name}"] for name in PLAYERS} == rewards
    if set(acted) == set(PLAYERS):
        of_turns = np.repeat([s.player for s in sample.sequences], [len(s.spans) for s in sample.sequences])
        for name in PLAYERS:
            assert sum(sample.turn_rewards[of_turns == name]) == rewards[name]
    again = episode(conversation, trained, room=room)
    restore([again] * 3, [decode(encode(log_of(turns), "test"), SessionLog)])
    other = again.sample()
    assert (again.state, again.reason, again.rewards, other.metrics) == (
        one.state,
        one.reason,
        rewards,
        sample.metrics,
    )
    assert [s.player for s in other.sequences] == [s.player for s in sample.sequences]
    for a, b in zip(sample.sequences, other.sequences, strict=True):
        for name in ("token_ids", "loss_mask", "logprobs", "versions", "spans"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name


def played(*story: tuple[str, str, str, dict[str, float]], trained: tuple[str, ...] = PLAYERS) -> Sample:
    one = episode(trained=trained)
    play(one, list(story))
    return one.sample()


def duel(solver: float, critic: float, said: str = "x", trained: tuple[str, ...] = PLAYERS) -> Sample:
    """The solver answers twice, the critic once in between."""
    end = {"solver": solver, "critic": critic}
    return played(("", "", said, {}), ("critic", "ab", "yz", {}), ("solver", "c", "z", end), trained=trained)


def advantages(samples: list[Sample], *more: str) -> tuple[Trajectory, np.ndarray]:
    config = load_config(PICK, [*SETTINGS, *more])
    trajectory = Trajectory.of(PROMPT, samples)
    again = decode(encode(trajectory, "test"), Trajectory)
    assert again.players == trajectory.players
    section = config.environment
    assert section is not None
    reward = environment_reward(again, section.credit, section.discount, section.trained_players)
    assert set(reward.components) == set(config.reward_components)
    found = RowEstimation(config).estimate(reward, {"trajectory": again}, "row")
    assert found.lengths.tolist() == trajectory.sample_lengths.tolist()
    return trajectory, found.values


def test_rivals_are_compared_with_each_other_in_their_sample_and_others_across_samples() -> None:
    rewards = [(1.0, 0.0), (0.5, 1.0), (0.0, 0.0)]
    settings = ("algorithm.name=hierarchical_grpo", "environment.players=['solver', 'critic', 'proposer']")
    story = (("proposer", "", "x", {}), ("critic", "ab", "yz", {}), ("solver", "c", "z", {}), ("critic", "d", "y", {}))

    def trio(number: int) -> Sample:
        one = Episode(
            Start(RowId(0, 0), 2, 77, PROMPT, players=("proposer", *PLAYERS), trained=("proposer", *PLAYERS)),
            Limits(max_turns=8, max_tokens=5, room=60, token_budget=None),
            Letters(),
        )
        solver, critic = rewards[number]
        end = {"proposer": float(number), "solver": solver, "critic": critic}
        play(one, [*story, ("solver", "e", "x", end)])
        return one.sample()

    trajectory, found = advantages([trio(i) for i in range(3)], *settings, "algorithm.rivals=['solver', 'critic']")
    for part in parts_of(trajectory):
        (player,) = set(part.players)
        lengths = part.trajectory.sample_lengths
        expected = [i - 1.0 for i in range(3)]
        if player != "proposer":
            sign = 1 if player == "solver" else -1
            expected = [sign * (solver - critic) / 2 for solver, critic in rewards]
        assert found[part.tokens].tolist() == np.repeat(expected, lengths).tolist(), player
    rivals = parts_of(trajectory, PLAYERS)
    assert [part.title for part in rivals][:2] == ["player proposer", "players solver, critic of sample 0"]
    tokens = np.sort(np.concatenate([part.tokens for part in rivals]))
    assert tokens.tolist() == [*range(len(trajectory.token_ids))]
    for part in rivals:
        assert part.trajectory.token_ids.tolist() == trajectory.token_ids[part.tokens].tolist()
        own = [part.trajectory.token_ids[b:e].tolist() for b, e in part.trajectory.turn_spans]
        whole = [trajectory.token_ids[b:e].tolist() for b, e in trajectory.turn_spans]
        assert all(turn in whole for turn in own)


def test_rivals_without_a_reward_of_their_own_are_an_error_that_names_them() -> None:
    rivals = ("algorithm.rivals=['solver', 'critic']", "algorithm.shaping.filter_zero_variance=true")
    config = load_config(PICK, [*SETTINGS, *rivals])
    columns = {"trajectory": Trajectory.of(PROMPT, [duel(1, 0), duel(0, 1)])}
    values = np.array([1, 0], np.float32)
    estimation = RowEstimation(config)
    for components, missing in (({}, "solver, critic"), ({"critic": values}, "solver")):
        reward = Reward(values, components)
        assert estimation.without_signal(reward, columns) == ""
        with pytest.raises(RowError, match=rf"algorithm\.rivals .* has none for {missing}; return a reward for each"):
            estimation.estimate(reward, columns, "row")
    equal = Reward(values, dict.fromkeys(PLAYERS, values))
    assert_says(estimation.without_signal(equal, columns), "2 samples", "rivals")


def test_kl_of_a_row_is_the_mean_over_samples_although_players_acted_in_few() -> None:
    kl = ("algorithm.kl.place=reward", "algorithm.kl.coefficient=0.1", "algorithm.kl.kind=k1")
    alone = played(("", "", "x", {}), ("solver", "c", "z", {"solver": 1.0}))
    trajectory = Trajectory.of(PROMPT, [duel(1, 0), duel(0, 1), duel(1, 0), alone, alone])
    rewards = np.arange(5, dtype=np.float32)
    by_player = {"solver": 0.1, "critic": 0.4}  # log-prob ratio to the reference at each token
    of_token = np.repeat([by_player[name] for name in trajectory.players], trajectory.lengths)
    columns = {"trajectory": trajectory, "reference": (trajectory.logprobs - of_token).astype(np.float32)}
    reward = Reward(rewards, dict.fromkeys(PLAYERS, rewards))
    found = RowEstimation(load_config(PICK, [*SETTINGS, *kl])).estimate(reward, columns, "row")
    sums = [float((part.trajectory.trained * by_player[part.players[0]]).sum()) for part in parts_of(trajectory)]
    assert found.kl == pytest.approx(sum(sums) / 8, rel=1e-5)


def test_each_player_is_compared_with_itself_in_the_other_samples() -> None:
    rewards = [(1.0, -1.0), (-1.0, 1.0), (1.0, -1.0), (0.0, 0.0)]
    trajectory, found = advantages([duel(*reward) for reward in rewards])
    for k, part in enumerate(parts_of(trajectory)):
        expected = by_sample(Group(rewards=np.array([reward[k] for reward in rewards])))
        lengths = part.trajectory.sample_lengths
        mask = part.trajectory.trained
        np.testing.assert_allclose(found[part.tokens][mask], np.repeat(expected, lengths)[mask], rtol=1e-6)
    assert set(trajectory.players) == set(PLAYERS)


def test_a_sample_in_which_a_player_did_not_act_is_not_compared_with() -> None:
    alone = played(("", "", "x", {"solver": 1.0, "critic": 9.0}))
    trajectory, found = advantages([duel(1.0, 0.0), duel(0.0, 1.0), alone])
    critic = next(part for part in parts_of(trajectory) if "critic" in part.players)
    assert critic.samples.tolist() == [0, 1]
    values = found[critic.tokens][critic.trajectory.trained]
    expected = by_sample(Group(rewards=np.array([0.0, 1.0])))
    np.testing.assert_allclose(values, np.repeat(expected, 2), rtol=1e-6)


def test_a_player_that_acts_in_one_sample_alone_has_no_advantage() -> None:
    alone = [played(("", "", "x", {"solver": reward})) for reward in (0.0, 1.0)]
    trajectory, found = advantages([duel(1.0, 5.0), *alone])
    critic = next(part for part in parts_of(trajectory) if "critic" in part.players)
    assert not found[critic.tokens].any()
    assert found.any()


def test_a_player_that_does_not_act_in_the_greedy_sample_has_no_advantage() -> None:
    alone = played(("", "", "x", {"solver": 0.5}))
    greedy = replace(alone, sequences=tuple(sequence.masked() for sequence in alone.sequences))
    settings = ("algorithm.advantage=greedy", "algorithm.scale=none")
    trajectory, found = advantages([duel(1.0, 5.0), duel(0.0, 1.0), greedy], *settings)
    solver, critic = parts_of(trajectory)
    assert ({*solver.players}, {*critic.players}) == ({PLAYERS[0]}, {PLAYERS[1]})
    assert not found[critic.tokens].any(), "no sample of its own is its baseline"
    assert found[solver.tokens].any()


def test_players_that_are_not_trained_have_neither_mask_nor_advantage() -> None:
    samples = [duel(reward, -reward, trained=("critic",)) for reward in (1.0, 0.0)]
    trajectory, found = advantages(samples, "environment.trained=['critic']")
    (critic,) = parts_of(trajectory)
    assert {*critic.players} == {"critic"}
    assert trajectory.metrics["environment_reward"] == [-1.0, 0.0]
    assert np.flatnonzero(found).tolist() == critic.tokens.tolist()
    assert set(np.flatnonzero(trajectory.trained)) < set(critic.tokens.tolist())


def test_credit_of_turns_is_that_of_the_turns_of_each_player() -> None:
    story = [
        ("", "", "x", {"solver": 1.0}),
        ("critic", "a", "y", {"critic": 0.5}),
        ("solver", "b", "z", {"solver": 2.0}),
    ]
    other = [(*turn[:3], {}) for turn in story]
    trajectory, found = advantages(
        [played(*story), played(*other)], "environment.credit=turn", "environment.discount=0"
    )
    spans = trajectory.turn_spans
    values = [found[begin] for begin, _ in spans.tolist()]
    by = np.sqrt((0.5 + 2.0) / 2)
    np.testing.assert_allclose(values[:3], [0.5 / by, 1.0 / by, 0.25 / np.sqrt(0.125)], rtol=1e-4)
    np.testing.assert_allclose(values[3:], np.negative(values[:3]))


def test_credit_of_branches_is_the_return_from_their_first_turn() -> None:
    rewards = [[0.5, 0.25, 1.0], [0.0, 0.0, 0.0]]
    samples = []
    for own in rewards:
        one = Episode(Start(RowId(0, 0), 0, 7, PROMPT), Limits(8, 5, 60), Letters(rewrites=True))
        one.step(answer())
        for reward in own:
            write(one, "xy")
            one.step(answer("b", reward=reward))
        one.end(FinishReason.TIMEOUT)
        samples.append(one.sample())
    trajectory = Trajectory.of(PROMPT, samples)
    assert trajectory.branch_numbers[trajectory.trained].tolist() == [0, 0, 1, 1, 2, 2] * 2
    found = environment_reward(trajectory, "branch", 0.5)
    assert found.values.tolist() == [1.75, 0.0]
    config = load_config(PICK, ["environment.credit=branch", "environment.discount=0.5", "algorithm.scale=none"])
    assert config.algorithm.advantage == "turn"
    values = RowEstimation(config).estimate(found, {"trajectory": trajectory}, "row").values[trajectory.trained]
    returns = np.array([0.5 + 0.5 * (0.25 + 0.5), 0.25 + 0.5, 1.0])
    np.testing.assert_allclose(values[:6], np.repeat(returns / 2, 2), rtol=1e-6)


def test_turns_of_one_sequence_are_one_branch() -> None:
    samples = []
    for own in ([1.0, 3.0], [0.0, 0.0]):
        one = Episode(Start(RowId(0, 0), 0, 7, PROMPT), Limits(8, 5, 60), Letters())
        one.step(answer())
        for reward in own:
            write(one, "x")
            one.step(answer("b", reward=reward))
        one.end(FinishReason.TIMEOUT)
        samples.append(one.sample())
    found = environment_reward(Trajectory.of(PROMPT, samples), "branch", 0.0)
    assert found.values.tolist() == [4.0, 0.0]
    assert not found.token_values.any()


def test_a_row_is_dropped_only_if_no_player_has_a_signal() -> None:
    estimation = RowEstimation(load_config(PICK, [*SETTINGS, "algorithm.shaping.filter_zero_variance=true"]))
    for rewards, why in (
        ([(1.0, -1.0), (-1.0, 1.0)], ""),
        ([(1.0, -1.0), (1.0, -1.0)], "no player scored differently in any two of 2 samples"),
    ):
        trajectory = Trajectory.of(PROMPT, [duel(*each) for each in rewards])
        reward = environment_reward(trajectory, "episode", 1.0, PLAYERS)
        assert reward.values.tolist() == [0.0, 0.0]
        assert estimation.without_signal(reward, {"trajectory": trajectory}) == why


def test_the_row_of_a_group_names_the_player_of_each_message(tmp_path: Path) -> None:
    found = EpisodeGroup(Row(RowId(3, 1), {}, Store(tmp_path)), None, 0.0)  # type: ignore[arg-type]
    one = episode()
    play(one, [("", "", "x", {}), ("critic", "ab", "y", {"solver": 1.0})])
    found.members.append(one)
    section = EnvironmentSection.model_validate({"name": "x.Y", "players": PLAYERS})
    trajectory = found.result(section, {})
    assert isinstance(trajectory, Trajectory)
    assert trajectory.players == list(PLAYERS)
    assert trajectory.samples[0].messages == [
        {"role": "assistant", "content": "x", "player": "solver"},
        {"role": "user", "content": "ab", "player": "critic"},
        {"role": "assistant", "content": "y", "player": "critic"},
    ]
