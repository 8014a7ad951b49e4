"""Episodes: tokens only grow, every end has its reason, and recorded turns bring an episode to the same place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.codec import decode, encode
from broker.subjects import RowId
from relax_actors.data.character_tokenizer import make_character_tokenizer
from relax_actors.data.renderer import Extension, Message
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols import Generation
from relax_actors.errors import TooLongError
from relax_actors.messages import EnvironmentAnswer, FinishReason, SessionLog, SessionState, SessionTurn, Trajectory
from relax_actors.rewards.credit import discounted, environment_reward
from relax_actors.sessions.conversation import PlainConversation, text_of
from relax_actors.sessions.episode import Episode
from relax_actors.sessions.episode_start import Limits, Start
from relax_actors.sessions.session_log import restore
from tests.support.turns import log_of, repeat_turns

PROMPT = np.array([1, 2, 3], np.int32)


class Letters:
    """Conversation whose tokens are the code points of the texts; `rewrites` drops every earlier answer."""

    offers_tools = False

    def __init__(self, *, needs_stop: bool = False, rewrites: bool = False) -> None:
        self.needs_stop, self._rewrites = needs_stop, rewrites

    def prompt(self, messages: Sequence[Message]) -> Any:
        kept = [m for m in messages if not (self._rewrites and m["role"] == "assistant")]
        return np.array([ord(c) for c in text_of(kept)], np.int32)

    def extend(self, history: Sequence[Message], answer: Any, new: Sequence[Message]) -> Extension:
        del history, answer
        return Extension(np.array([ord(c) for c in text_of(new)], np.int32), is_faithful=not self._rewrites)

    def text(self, tokens: Any) -> str:
        return "".join(chr(t) for t in tokens)


def episode(conversation: Letters | None = None, **limits: Any) -> Episode:
    found = {"max_turns": 4, "max_tokens": 5, "room": 60, "token_budget": None, **limits}
    return Episode(Start(RowId(0, 0), 2, 77, PROMPT), Limits(**found), conversation or Letters())


def answer(text: str = "", turn: int = 0, **fields: Any) -> EnvironmentAnswer:
    messages = [{"role": "user", "content": text}] if text else []
    return EnvironmentAnswer("s", turn, messages, **fields)


def write(one: Episode, text: str, reason: FinishReason = FinishReason.STOP) -> SessionTurn:
    """Let the model write a text."""
    tokens = np.array([ord(c) for c in text], np.int32)
    logprobs, versions = np.full(len(tokens), -0.5, np.float32), np.full(len(tokens), 7, np.int32)
    return one.say(Generation(tokens, logprobs, versions, reason))


def say(one: Episode, tokens: Any) -> SessionTurn:
    """Let the model write tokens."""
    return one.say(
        Generation(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), FinishReason.STOP)
    )


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, str, FinishReason, float | None]]:
    """Observation, answer, finish reason and reward of each turn."""
    text, reasons = st.text("abc", max_size=6), st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])
    return draw(
        st.lists(st.tuples(text, st.text("xyz", min_size=1, max_size=5), reasons, st.none() | st.floats(-1, 1)))
    )


def play(one: Episode, story: list[tuple[str, str, FinishReason, float | None]]) -> list[SessionTurn | SessionState]:
    turns, reward = [], None
    for number, (seen, said, reason, next_reward) in enumerate(story):
        if one.state is not None:
            break
        before = list(one.tokens) if one.turns else []
        one.step(answer(seen, number - 1, reward=reward))
        reward = next_reward
        if one.reading is None:
            break
        if not one.branches:
            assert list(one.tokens)[: len(before)] == before
        turns.append(write(one, said[: one.max_tokens], reason))
    if (one.state, one.reading) == (None, None):
        one.step(answer("", len(turns) - 1, reward=reward, done=True))
    if one.state is None:
        one.end(FinishReason.TIMEOUT)
    return [*turns, one.state]


CONVERSATIONS = [Letters(needs_stop=stop, rewrites=rewrites) for stop in (False, True) for rewrites in (False, True)]


@settings(max_examples=60, deadline=None)
@given(stories(), st.sampled_from(CONVERSATIONS), st.integers(4, 40), st.none() | st.integers(1, 20))
def test_every_sampled_token_is_trained_once_and_recorded_turns_repeat_the_episode(
    story: Any, conversation: Letters, room: int, budget: int | None
) -> None:
    one = episode(conversation, room=room, token_budget=budget)
    turns = play(one, story)
    sample = one.sample()
    assert one.state is not None
    assert sample.finish_reason in FinishReason
    said = "".join(one.actions)
    assert "".join(chr(t) for s in sample.sequences for t in s.token_ids[s.loss_mask]) == said
    assert all(len(s.token_ids) <= max(room, len(PROMPT)) for s in sample.sequences)
    assert sum(len(s.spans) for s in sample.sequences) == one.turns == len(sample.turn_rewards)
    assert sample.metrics["environment_reward"] == pytest.approx(float(np.sum(sample.turn_rewards)), abs=1e-5)
    cell = decode(encode(log_of(turns), "test"), SessionLog)
    again = episode(conversation, room=room, token_budget=budget)
    restore([again] * 3, [cell])
    other = again.sample()
    assert (again.state, again.reason, again.actions) == (one.state, one.reason, one.actions)
    for a, b in zip(sample.sequences, other.sequences, strict=True):
        for name in ("token_ids", "loss_mask", "logprobs", "versions", "spans"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert other.metrics == sample.metrics


@settings(max_examples=40, deadline=None)
@given(stories(), st.data())
def test_any_prefix_of_the_turns_leaves_an_episode_that_waits_for_its_last_action(story: Any, data: Any) -> None:
    one = episode()
    *turns, _ = play(one, story)
    kept = turns[: data.draw(st.integers(0, len(turns)))]
    again = episode()
    assert repeat_turns([again] * 3, kept) == len(kept)
    assert again.actions == one.actions[: len(kept)]
    if kept and again.state is None:
        assert (again.state, again.reading) == (None, None)
        assert (again.seed == one.seed) == (len(kept) == one.turns)


def test_turns_of_another_actor_that_do_not_follow_are_not_taken() -> None:
    one, other = episode(), episode()
    for each, said in ((one, "x"), (other, "yy")):
        each.step(answer("a"))
        write(each, said)
    other.step(answer("b"))
    foreign = write(other, "z")
    assert not one.repeat(foreign)
    assert one.actions == ["x"]


def test_a_sample_that_begins_again_forgets_its_turns_and_draws_other_numbers() -> None:
    one = episode()
    one.step(answer())
    first = one.seed
    write(one, "x")
    one.restart()
    one.step(answer())
    assert one.seed != first
    turn = write(one, "q")
    again = episode()
    assert repeat_turns([again] * 3, [turn]) == 1
    assert (again.attempt, again.actions) == (1, ["q"])


ENDS = [
    ({"done": True}, {}, FinishReason.ENV_DONE),
    ({"truncated": True}, {}, FinishReason.MAX_TURNS),
    ({}, {"max_turns": 1}, FinishReason.MAX_TURNS),
    ({}, {"room": 5}, FinishReason.TOKEN_BUDGET),
    ({}, {"token_budget": 2}, FinishReason.TOKEN_BUDGET),
]


@pytest.mark.parametrize(("fields", "limits", "reason"), ENDS)
def test_an_episode_ends_with_the_reason_of_its_limit(fields: Any, limits: Any, reason: FinishReason) -> None:
    one = episode(**limits)
    one.step(answer())
    write(one, "x")
    one.step(answer("b", **fields))
    assert one.state.reason == reason
    assert one.sample().sequences[0].token_ids.tolist() == [1, 2, 3, ord("x")]


def test_a_cut_off_answer_ends_a_chat_but_not_a_plain_episode() -> None:
    chat, plain = episode(Letters(needs_stop=True)), episode()
    for one in (chat, plain):
        one.step(answer())
        write(one, "x", FinishReason.LENGTH)
    assert chat.reason is FinishReason.LENGTH
    assert (plain.state, plain.reading) == (None, None)


def test_a_rewritten_history_begins_a_sequence_and_trains_no_token_twice() -> None:
    one = episode(Letters(rewrites=True))
    one.step(answer())
    write(one, "x")
    one.step(answer("bc", reward=0.25))
    write(one, "y")
    one.step(answer("", done=True, reward=0.5))
    sample = one.sample()
    assert [s.token_ids.tolist() for s in sample.sequences] == [[1, 2, 3, 120], [98, 99, 121]]
    assert sample.metrics["branches"] == 1
    assert Trajectory.of(PROMPT, [sample, sample]).turn_counts.tolist() == [2, 2]


def test_credit_of_turns_is_their_discounted_return() -> None:
    samples = []
    for rewards in ([0.5, 0.0, 1.0], [0.25]):
        one, last = episode(), None
        for reward in rewards:
            one.step(answer("ab", reward=last))
            write(one, "xy")
            last = reward
        one.step(answer("", done=True, reward=last))
        samples.append(one.sample())
    trajectory = Trajectory.of(PROMPT, samples)
    assert trajectory.turn_counts.tolist() == [3, 1]
    restored = [s.turn_rewards.tolist() for s in trajectory.samples]
    assert restored == [[0.5, 0.0, 1.0], [0.25]]
    assert trajectory.turn_numbers[trajectory.trained].tolist() == [0, 0, 1, 1, 2, 2, 0, 0]
    found = environment_reward(trajectory, "turn", 0.5)
    assert found.values.tolist() == [1.5, 0.25], "the reward of a row is what its environment gave, without discount"
    ends = np.cumsum(found.lengths)
    for i, (begin, end) in enumerate(zip(ends - found.lengths, ends, strict=True)):
        to_go = found.values[i] + np.cumsum(found.token_values[begin:end][::-1])[::-1]
        of_turns = to_go[trajectory.trained[begin:end]].reshape(-1, 2)
        expected = discounted(samples[i].turn_rewards.astype(float), 0.5)
        np.testing.assert_allclose(of_turns, np.repeat(expected[:, None], 2, 1), atol=1e-6)


def test_a_turn_that_follows_another_observation_is_not_repeated() -> None:
    one, other = episode(), episode()
    turns = []
    for each, seen in ((one, "a"), (other, "b")):
        each.step(answer(seen))
        first = write(each, "x")
        each.step(answer("c"))
        turns.append((first, write(each, "y")))
    again = episode()
    assert repeat_turns([again] * 3, [turns[0][0], turns[1][1]]) == 1
    assert again.turns == 1


def test_a_recorded_attempt_begins_at_once() -> None:
    one = episode()
    one.step(answer())
    turn = replace(write(one, "x"), attempt=1 << 60)
    again = episode()
    assert not again.repeat(turn)
    assert again.attempt == 1 << 60


def test_an_observation_that_the_tokenizer_lacks_is_read_escaped_and_repeated_with_the_same_tokens(
    tmp_path: Path,
) -> None:
    make_character_tokenizer("0123456789abcdefux\\>#", "#", tmp_path)
    story = ["Error: \u2713", "no such file"]

    def begin() -> tuple[Episode, Tokenizer]:
        """Begin as an actor that has not seen any text."""
        tokenizer = Tokenizer(tmp_path)
        return Episode(Start(RowId(0, 0), 0, 1, PROMPT), Limits(4, 5, 500), PlainConversation(tokenizer)), tokenizer

    one, tokenizer = begin()
    turns = []
    for number, text in enumerate(story):
        one.step(answer(text, number - 1))
        assert one.reading is not None
        turns.append(say(one, tokenizer.encode("12")))
    assert tokenizer.decode(one.sample().sequences[0].token_ids[len(PROMPT) :]) == (
        r"\x45\x72\x72\x6f\x72\x3a\x20\u271312\x6e\x6f\x20\x73uc\x68\x20f\x69\x6ce12"
    )
    assert tokenizer.replaced == {"characters_escaped": 16, "characters_dropped": 0}

    other, fresh = begin()
    assert repeat_turns([other], turns[:1]) == 1
    other.step(answer(story[1], 0))
    np.testing.assert_array_equal(other.tokens, one.tokens[: len(other.tokens)])
    assert fresh.replaced == {"characters_escaped": 8, "characters_dropped": 0}, "recorded tokens are not encoded again"


class SmallContext(Letters):
    """Conversation of a model whose context holds ten letters."""

    def extend(self, history: Sequence[Message], answer: Any, new: Sequence[Message]) -> Extension:
        if len(text_of(new)) > 10:
            msg = "the text has more bytes than the context holds"
            raise TooLongError(msg)
        return super().extend(history, answer, new)


def test_observation_that_is_too_long_to_be_tokenized_ends_the_sample_at_its_budget() -> None:
    one = episode(SmallContext())
    one.step(answer("go"))
    write(one, "xyz")
    one.step(answer("a" * 11, 1, reward=0.5))
    assert one.state.reason == FinishReason.TOKEN_BUDGET
    sample = one.sample()
    assert sample.sequences[0].token_ids.tolist() == [*PROMPT.tolist(), *map(ord, "goxyz")]
    assert sample.metrics["environment_reward"] == 0.5
