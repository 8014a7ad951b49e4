"""Episodes whose observations hold media: expanded tokens, masks and positions, and turns that are repeated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from broker.codec import decode, encode
from broker.fields import TensorRef
from broker.subjects import RowId
from relax_actors.data.media_fields import content_parts
from relax_actors.engines.protocols.media import PromptMedia, items_of
from relax_actors.errors import RowError, StoreError
from relax_actors.messages import (
    EnvironmentAnswer,
    FinishReason,
    Media,
    MediaSource,
    ObservedMedia,
    SessionLog,
    SessionState,
    SessionTurn,
    Trajectory,
)
from relax_actors.sessions.episode import Episode
from relax_actors.sessions.episode_start import Limits, Start
from relax_actors.sessions.observation_media import Observation
from relax_actors.sessions.session_log import restore
from tests.support.messages import assert_says
from tests.support.turns import log_of, repeat_turns
from tests.unit.test_episode import Letters, write

PLACEHOLDER, WIDE = "#", 3
"""What stands for a picture, and how many tokens it takes: on one place of the first axis, as a row of pixels does."""


class Pictures(Letters):
    """Conversation in which a picture is a placeholder."""

    def prompt(self, messages: Any) -> Any:
        return super().prompt([m | {"content": _text(m["content"])} for m in messages])

    def extend(self, history: Any, answer: Any, new: Any) -> Any:
        return super().extend(history, answer, [m | {"content": _text(m["content"])} for m in new])


def _text(content: Any) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return "".join(part.get("text", PLACEHOLDER) for part in parts)


class Prepare:
    """Prepares pictures by a rule: each takes three tokens. `lost` names the pictures whose features are gone."""

    none = PromptMedia.none("int32")

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.reader = self

    def admit_messages(
        self, messages: Sequence[dict[str, Any]], row: RowId, where: str
    ) -> tuple[list[dict[str, Any]], list[MediaSource]]:
        del row
        plain, sources = [], []
        for message in messages:
            parts, media = content_parts(message["content"], None, where)
            plain.append({**message, "content": parts})
            sources += [MediaSource(one.kind, "", xxh3_128=one.data.hex()) for one in media]
        return plain, sources

    def append(
        self, length: int, before: PromptMedia, tokens: Any, sources: Sequence[MediaSource], row: RowId, where: str
    ) -> Observation:
        del row
        if (tokens == ord(PLACEHOLDER)).sum() != len(sources):
            raise RowError(f"{where}: placeholders do not fit")
        if length and not sources:
            return Observation(tokens, before)
        at = int(before.positions_of(length + 1)[0, -1])
        found, places, media = list[int](), list[int](), list[Media]()
        for token in tokens.tolist():
            count = WIDE if token == ord(PLACEHOLDER) else 1
            if count == WIDE:
                reference = TensorRef(sources[len(media)].digest, 0, 0, "uint8", (0,), "")
                media.append(Media("image", len(media), reference, np.ones(3, np.int32), len(found), WIDE))
            found += [token] * count
            places += [at] * count
            at += 1
        observed = ObservedMedia(length, list(sources), media, np.array([places] * 3, np.int32))
        return Observation(np.array(found, np.int32), self.observed(before, [observed]), observed)

    def observed(self, before: PromptMedia, observations: Sequence[ObservedMedia]) -> PromptMedia:
        (observed,) = observations
        if self.lost & {source.digest for source in observed.sources}:
            raise StoreError("gone")
        return before.extended(observed.start, observed.positions, items_of(observed.media, observed.media))  # type: ignore[arg-type]


def seen(text: str, *pictures: bytes, turn: int = 0, **fields: Any) -> EnvironmentAnswer:
    parts: list[dict[str, Any]] = [{"type": "image", "bytes": one} for one in pictures]
    content = [*parts, {"type": "text", "text": text}]
    return EnvironmentAnswer("s", turn, [{"role": "user", "content": content}], **fields)


def episode(prepare: Prepare, conversation: Letters | None = None, *, from_environment: bool = False) -> Episode:
    """Return an episode whose prompt is a picture and `>`, or nothing."""
    tokens, source = np.array([ord(c) for c in "#>"], np.int32), MediaSource("image", "", "p")
    first = prepare.append(0, prepare.none, tokens, [source], RowId(0, 0), "")
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ">"}]}]
    start = Start(RowId(0, 0), 0, 7, first.tokens, messages, media=first.media, sources=[source], prepare=prepare)
    if from_environment:
        start = Start(RowId(0, 0), 0, 7, np.zeros(0, np.int32), media=prepare.none, prepare=prepare)
    return Episode(start, Limits(3, 4, 60), conversation or Pictures())


def play(one: Episode, *observations: EnvironmentAnswer) -> list[SessionTurn | SessionState]:
    turns: list[SessionTurn | SessionState] = []
    for answer in observations:
        one.step(answer)
        if one.reading is not None:
            turns.append(write(one, "xy"))
    return turns


ANSWERS = seen(""), seen("a", b"1", b"2"), seen("b")


def test_pictures_are_expanded_between_turns_and_never_trained() -> None:
    one = episode(Prepare())
    turns = play(one, EnvironmentAnswer("s", -1), *ANSWERS[1:])
    assert "".join(map(chr, one.tokens)) == "###>xy######axybxy"
    media = one.media
    assert media is not None
    positions = media.positions_of(len(one.tokens))
    assert positions[0].tolist() == [0, 0, 0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 6, 7, 8, 9, 10, 11]
    assert [item.start for item in media.items] == [0, 6, 9]
    one.end(FinishReason.MAX_TURNS)
    row = Trajectory.of(one.start.tokens, [one.sample()])
    assert [len(observed) for observed in row.observed] == [1]
    again = decode(encode(row, "rollout.0#1"), Trajectory)
    (sequence,) = again.sequences
    assert [observed.start for observed in sequence.observed] == [6]
    assert "".join(map(chr, sequence.token_ids[sequence.loss_mask])) == "xyxyxy"
    assert [len(one.turn.media) for one in turns if isinstance(one, SessionTurn)] == [0, 1, 0]
    content = again.samples[0].messages[2]["content"]
    assert content[0] == {"type": "image", "bytes": "xxh3:" + content[0]["bytes"].removeprefix("xxh3:")}
    assert len(content[0]["bytes"]) == 37


def test_recorded_turns_bring_media_back_without_their_files() -> None:
    prepare = Prepare()
    one = episode(prepare)
    turns = play(one, EnvironmentAnswer("s", -1), *ANSWERS[1:])
    cell = decode(encode(log_of(turns), "rollout.0#1"), SessionLog)
    other = episode(prepare)
    assert restore([other], [cell]) == 3
    np.testing.assert_array_equal(other.tokens, one.tokens)
    assert other.media is not None
    assert one.media is not None
    np.testing.assert_array_equal(other.media.positions, one.media.positions)
    assert [answer.digest for answer in other.seen] == [a.digest for a in (EnvironmentAnswer("s", -1), *ANSWERS[1:])]


def test_a_turn_with_lost_media_is_generated_again() -> None:
    prepare = Prepare()
    turns = play(episode(prepare), EnvironmentAnswer("s", -1), *ANSWERS[1:])
    prepare.lost = {"32"}
    other = episode(prepare)
    assert repeat_turns([other], turns) == 1
    assert (other.state, other.reading) == (None, None)
    prepare.lost.clear()
    other.step(ANSWERS[1])
    assert other.reading is not None


def test_a_conversation_that_is_written_anew_shows_all_its_pictures_again() -> None:
    one = episode(Prepare(), Pictures(rewrites=True))
    play(one, EnvironmentAnswer("s", -1), *ANSWERS[1:])
    one.end(FinishReason.MAX_TURNS)
    row = Trajectory.of(one.start.tokens, [one.sample()])
    texts = ["".join(map(chr, sequence.token_ids)) for sequence in row.sequences]
    assert texts == ["###>xy", "###>######axy", "###>######abxy"]
    assert [[each.start for each in observed] for observed in row.observed] == [[], [0], [0]]
    assert [len(observed[0].sources) for observed in row.observed[1:]] == [3, 3]


def test_a_prompt_of_the_environment_has_media_of_its_own() -> None:
    one = episode(Prepare(), from_environment=True)
    play(one, ANSWERS[1])
    one.end(FinishReason.TIMEOUT)
    (sequence,) = one.sample().sequences
    assert "".join(map(chr, sequence.token_ids)) == "######axy"
    assert [observed.start for observed in sequence.observed] == [0]


def test_a_picture_without_a_file_is_an_error_of_the_observation() -> None:
    one = episode(Prepare())
    with pytest.raises(RowError, match=r"turn 0 of sample 0 of group\.0\.0: placeholders"):
        one.step(EnvironmentAnswer("s", -1, [{"role": "user", "content": [{"type": "image"}]}]))


def test_a_picture_for_a_model_of_text_is_named() -> None:
    one = Episode(Start(RowId(0, 0), 0, 7, np.array([1], np.int32)), Limits(3, 4, 60), Letters())
    with pytest.raises(RowError) as caught:
        one.step(seen("a", b"1"))
    assert_says(caught.value, "'image'", "text alone")
