"""Placeholders that do not fit, prompts without media, and timestamps of byte-pair tokenizers.

Expanded tokens and positions are compared with transformers in tests/parity/test_media_expansion.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from relax_actors.data.character_tokenizer import make_character_tokenizer
from relax_actors.errors import RowError
from relax_actors.media import Features, expand
from relax_actors.media.timestamps import Timestamps, missing_characters
from tests.support.media_models import OMNI, VISION, encode, family, tokenizer
from tests.support.messages import assert_says

IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
SOUND = "<|audio_start|><|audio_pad|><|audio_end|>"
TIMESTAMP = family("qwen3_vl").spec.timestamp


def image() -> Features:
    return Features("image", np.zeros((4, 192), np.uint8), np.array([1, 2, 2], np.int32))


def video() -> Features:
    return Features("video", np.zeros((8, 384), np.uint8), np.array([2, 2, 2], np.int32), 1.0, (0.25, 1.25))


def sound(*, inside: bool) -> Features:
    return Features("audio", np.zeros((64, 100), np.float32), np.array([100], np.int32), inside=inside)


def message(text: str, media: list[Features], model: str = "qwen3_vl") -> str:
    with pytest.raises(RowError) as caught:
        expand(encode(text), media, family(model), tokenizer().backend_tokenizer)
    return str(caught.value)


@pytest.mark.parametrize("model", [*VISION, *OMNI])
def test_text_alone_keeps_its_tokens_and_counts_its_positions(model: str) -> None:
    found = expand(encode("what?"), [], family(model), tokenizer().backend_tokenizer)
    assert found.tokens.tolist() == encode("what?").tolist()
    assert found.tokens.dtype == np.int32
    assert found.positions.tolist() == [list(range(5))] * 3
    assert found.delta == 0


def test_placeholders_that_do_not_fit_the_media_are_refused() -> None:
    number = "the prompt has {} placeholders for media and {} media; it needs one for each"
    assert message("a", [image()]) == number.format(0, 1)
    assert message(IMAGE * 2, [image()]) == number.format(2, 1)
    kinds = "placeholder 1 of the prompt is for video, and medium 1 is image"
    assert message(IMAGE + VIDEO, [image(), image()]) == kinds
    bare = "the placeholder of a video with its sound must stand between <|vision_bos|> and <|vision_eos|>"
    for text in ("<|video_pad|>", "a<|video_pad|>b", "<|vision_start|><|video_pad|>"):
        assert message(text, [video(), sound(inside=True)], "qwen2_5_omni_thinker") == bare


def test_tokenizer_that_cannot_write_timestamps_is_refused(tmp_path: Path) -> None:
    bare = Tokenizer(models.WordLevel({"<|endoftext|>": 0}, unk_token="<|endoftext|>"))  # noqa: S106 a token of text
    make_character_tokenizer("0123456789. secon#", "#", tmp_path)
    lacking = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for tokens, missing in ((bare, "<1234567890. second>"), (lacking, "<d>")):
        assert missing_characters(tokens, TIMESTAMP) == missing
        with pytest.raises(RowError) as caught:
            Timestamps(tokens, TIMESTAMP).after([], 1.0)
        assert_says(caught.value, "'<1.0 seconds>'", repr(missing), "model.tokenizer.alphabet")
    make_character_tokenizer("0123456789. second<>#", "#", tmp_path)
    assert missing_characters(Tokenizer.from_file(str(tmp_path / "tokenizer.json")), TIMESTAMP) == ""


@pytest.mark.parametrize("model", OMNI)
def test_sound_lies_in_time_between_the_frames(model: str) -> None:
    of = family(model)
    found = expand(encode(f"x{VIDEO}y"), [video(), sound(inside=True)], of, tokenizer().backend_tokenizer)
    assert found.counts == (2, 13 if "3" in model else 25)
    heard = found.positions[:, found.tokens == of.ids["audio"]]
    assert (np.diff(heard, axis=1) == 1).all()
    seen = found.positions[0, found.tokens == of.ids["video"]]
    # The second temporal patch comes one second later.
    assert seen[1] - seen[0] == of.seconds_scale


@pytest.mark.parametrize("model", [*VISION, *OMNI])
def test_observations_continue_the_positions_of_a_prompt(model: str) -> None:
    """In pieces as in one; what a video needs before its placeholder stands in the same piece."""
    of, tokens = family(model), tokenizer().backend_tokenizer
    pieces = [(f"ab{IMAGE}c", [image()]), ("12", []), (f"3{VIDEO}4 5", [video()]), ("", []), (f"{IMAGE}", [image()])]
    if model in OMNI:
        pieces.append((f"{VIDEO}{SOUND}9", [video(), sound(inside=True), sound(inside=False)]))
    whole = expand(encode("".join(text for text, _ in pieces)), [one for _, own in pieces for one in own], of, tokens)
    found, first, length = [], 0.0, 0
    for text, own in pieces:
        found.append(expand(encode(text), own, of, tokens, first))
        first, length = len(found[-1].tokens) + found[-1].delta, length + len(found[-1].tokens)
    np.testing.assert_array_equal(np.concatenate([each.tokens for each in found]), whole.tokens)
    np.testing.assert_array_equal(np.concatenate([each.positions for each in found], axis=1), whole.positions)
    assert first == length + whole.delta


def byte_pairs() -> Tokenizer:
    """Return a byte-pair tokenizer that has merged a full stop and the bracket of a timestamp."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokens.train_from_iterator(["see this.<0.5 seconds>", "see this.<1.5 seconds>"] * 20, trainer)
    tokens.add_special_tokens([AddedToken("<|vision_end|>", special=True)])
    return tokens


@pytest.mark.parametrize("text", ["see this.", "see this", "", "a<|vision_end|>", "<|vision_end|>see this."])
def test_timestamp_is_written_as_if_with_the_text_before_it(text: str) -> None:
    tokens = byte_pairs()
    before = tokens.encode(text).ids
    written = Timestamps(tokens, TIMESTAMP).after(before, 0.5)
    assert before[: len(before) - written.removed] + written.ids == tokens.encode(f"{text}<0.5 seconds>").ids
    assert bool(written.removed) == text.endswith(".")
