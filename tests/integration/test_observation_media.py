"""Media that arrive during a rollout: the same tokens, positions and features as in one prompt with all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.codec import decode, encode
from broker.subjects import RowId
from broker.table import Table
from relax_actors.data.prompt_maker import PromptMaker, admission_of, room
from relax_actors.data.task import Medium, Task
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols import MediaItem, PromptMedia
from relax_actors.errors import RowError, StoreError
from relax_actors.messages import ObservedMedia, Sample, TokenSequence, Trajectory
from relax_actors.sessions.observation_media import Observation, ObservationMedia
from relax_actors.training.media_preparer import MediaPreparer
from relax_actors.training.row_media import RowMedia
from tests.support.contexts import context_of
from tests.support.messages import assert_says
from tests.support.running import IMAGES
from tests.support.tiny_images import png

ROW = RowId(3, 1)


class Turns:
    """A sequence of a tiny Qwen3-VL that reads images between its turns."""

    def __init__(self, table: Table, folder: Path, *settings: str) -> None:
        self.context = context_of(table, folder, "rollout", (f'media.folders=["{folder}"]', *settings), 1, IMAGES)
        config, store = self.context.config, table.store
        self.preparer, self.reader = MediaPreparer(config, store), RowMedia(self.context)
        self.observations = ObservationMedia(self.context, self.reader)
        self.maker = PromptMaker(
            config.data, Tokenizer(config.model_path), room(config), 6, admission_of(config, store)
        )

    def prompt(self, text: str, *media: Medium) -> tuple[np.ndarray, PromptMedia]:
        """Prepare a prompt."""
        prompt = self.maker.make(Task(text, media=media), ROW, seed=1, min_version=0)
        return self.preparer.prepare_mapped(prompt, "group/3")

    def tokens(self, text: str, *media: Medium) -> np.ndarray:
        """Return tokens with one placeholder for each medium."""
        return self.maker.make(Task(text, media=media), ROW, seed=1, min_version=0).tokens

    def append(self, length: int, before: PromptMedia, text: str, *media: Medium) -> Observation:
        """Prepare an observation."""
        where = "the reply of turn 1"
        sources = self.observations.admit(media, ROW, where)
        return self.observations.append(length, before, self.tokens(text, *media), sources, ROW, where)


@pytest.fixture
def turns(table: Table, tmp_path: Path) -> Turns:
    return Turns(table, tmp_path)


def image(seed: int) -> Medium:
    return Medium("image", data=png(seed))


def facts(items: tuple[MediaItem, ...]) -> list[Any]:
    return [(item.kind, item.grid.tolist(), item.start, item.tokens, item.features.tolist()) for item in items]


def test_observations_continue_a_sequence_as_if_it_were_one_prompt(turns: Turns) -> None:
    tokens, media = turns.prompt("<image>7>", image(1))
    said, replies = turns.tokens("12"), []
    for text, seeds in (("3<image>4", (2,)), ("5", ()), ("<image><image>", (3, 1))):
        tokens = np.concatenate([tokens, said])
        replies.append(turns.append(len(tokens), media, text, *map(image, seeds)))
        tokens, media = np.concatenate([tokens, replies[-1].tokens]), replies[-1].media
    whole_tokens, whole = turns.prompt("<image>7>123<image>412512<image><image>", *map(image, (1, 2, 3, 1)))
    np.testing.assert_array_equal(tokens, whole_tokens)
    np.testing.assert_array_equal(media.positions, whole.positions)
    assert media.position_delta == whole.position_delta
    assert media.positions.dtype == whole.positions.dtype
    assert facts(media.items) == facts(whole.items)
    # Items are shared, so that towers encode them once for all sequences of a row.
    assert media.items[:2] == replies[0].media.items
    assert np.array_equal(media.positions_of(len(tokens) + 3)[:, -3:], whole.positions_of(len(tokens) + 3)[:, -3:])


def test_cell_of_an_observation_gives_its_media_back_if_a_segment_is_lost(turns: Turns, tmp_path: Path) -> None:
    (tmp_path / "shown.png").write_bytes(png(5))
    tokens, media = turns.prompt("<image>7>", image(1))
    found = turns.append(len(tokens) + 2, media, "<image>", Medium("image", path="shown.png", folder=tmp_path))
    (tmp_path / "shown.png").unlink()
    observed = decode(encode(found.observed, "rollout.0#1"), ObservedMedia)
    store = turns.context.table.store
    for _ in range(2):
        again = turns.reader.observed(media, [observed])
        assert facts(again.items) == facts(found.media.items)
        np.testing.assert_array_equal(again.positions, found.media.positions)
        assert again.position_delta == found.media.position_delta
        store.path(observed.media[0].features.uri).unlink()
        for shared in (store.root / "media").glob("*.safetensors"):
            shared.unlink()
    assert turns.reader.rebuilt == 1
    lost = replace(observed, sources=[replace(observed.sources[0], path="group/3/media.gone.raw")])
    with pytest.raises(StoreError, match="is gone from the store"):
        turns.reader.observed(media, [lost])


def test_bad_media_of_an_observation_name_it(turns: Turns, tmp_path: Path) -> None:
    tokens, media = turns.prompt("7>")

    def message(text: str, *shown: Medium) -> str:
        with pytest.raises(RowError) as caught:
            sources = turns.observations.admit(shown, ROW, "the reply of turn 1")
            turns.observations.append(len(tokens), media, turns.tokens(text), sources, ROW, "the reply of turn 1")
        return str(caught.value)

    assert_says(message("1", image(1)), "turn 1", "0 placeholders", "1 media")
    assert_says(message("1", Medium("audio", data=b"RIFF")), "turn 1", "audio", "qwen3_vl", "image, video")
    outside = tmp_path.parent / "outside.png"
    assert_says(
        message("1", Medium("image", path=str(outside), folder=tmp_path)),
        "turn 1",
        repr(str(outside)),
        tmp_path,
        "media.folders",
    )
    assert message("1", Medium("image", data=b"no picture")).startswith("the reply of turn 1: image: ")


def test_sequences_of_a_trajectory_read_what_the_rollout_read(turns: Turns) -> None:
    """Samples share the items that they have at one place; a branch brings a prompt of its own."""
    media = RowMedia(turns.context)
    prompt = turns.maker.make(Task("<image>7>", media=(image(1),)), ROW, seed=1, min_version=0)
    prepared = turns.preparer.prepare(prompt, "group/3")
    start, said = media.of(prepared, ROW), turns.tokens("12")
    length = len(prepared.tokens) + len(said)
    shown = turns.append(length, start, "3<image>4", image(2))
    branch = turns.append(0, media.none, "5<image>", image(3))
    assert shown.observed is not None
    assert branch.observed is not None

    def sequence(tokens: np.ndarray, *observed: ObservedMedia) -> TokenSequence:
        versions = np.full(len(tokens), -1, np.int32)
        versions[-1] = 0
        return TokenSequence(tokens, versions >= 0, np.zeros(len(tokens), np.float32), versions, observed=observed)

    one = sequence(np.concatenate([prepared.tokens, said, shown.tokens, said]), shown.observed)
    other = sequence(np.concatenate([branch.tokens, said]), branch.observed)
    plain = sequence(np.concatenate([prepared.tokens, said]))
    row = decode(
        encode(Trajectory.of(prepared.tokens, [Sample((one,)), Sample((one, other)), Sample((plain,))]), "rollout.0#1"),
        Trajectory,
    )
    first, second, third, fourth = media.of_sequences(prepared, ROW, row)
    for found, wanted in ((first, shown.media), (third, branch.media), (fourth, start)):
        assert facts(found.items) == facts(wanted.items)
        np.testing.assert_array_equal(found.positions, wanted.positions)
        assert found.position_delta == wanted.position_delta
    assert list(map(id, first.items)) == list(map(id, second.items))
    wrong = replace(shown.observed, media=[replace(shown.observed.media[0], tokens=1)])
    row = Trajectory.of(prepared.tokens, [Sample((replace(one, observed=(wrong,)),))])
    with pytest.raises(RowError, match=r"2 placeholders .*image for 1 tokens"):
        media.of_sequences(prepared, ROW, row)
    row = Trajectory.of(branch.tokens, [Sample((sequence(np.concatenate([branch.tokens, said])),))])
    with pytest.raises(RowError, match=r"prompt is not .* column media"):
        media.of_sequences(prepared, ROW, row)
