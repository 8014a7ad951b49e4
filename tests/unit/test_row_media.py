"""Column `media` of a role that is wrong or of another version: an error of its row, not of the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from broker.fields import TensorRef
from relax_actors.errors import RowError
from relax_actors.media import Family
from relax_actors.messages import Media, PreparedPrompt
from relax_actors.training.row_media import check_shared, misfit
from tests.support.media_models import family
from tests.support.messages import assert_says

OMNI, VL = family("qwen3_omni_moe_thinker"), family("qwen3_vl")


def medium(of: Family, kind: str, start: int) -> Media:
    """Return features as the role `media` makes them."""
    if kind == "audio":
        assert of.audio is not None
        features = TensorRef("group/3/a", 0, 64 * 80 * 4, "float32", (of.audio.mels, 80), "")
        return Media(kind, 0, features, np.array([80], np.int32), start, of.audio.tokens(80))
    assert of.vision is not None
    width = 3 * of.vision.patch**2 * (1 if kind == "image" else of.vision.temporal)
    features = TensorRef("group/3/v", 0, 16 * width, "uint8", (16, width), "")
    return Media(kind, 0, features, np.array([1, 4, 4], np.int32), start, 4)


def prepared(of: Family, *kinds: str) -> PreparedPrompt:
    """Return a prompt with these media."""
    tokens, media = [50], []
    for kind in kinds:
        media.append(medium(of, kind, len(tokens)))
        tokens += [*[of.ids[kind]] * media[-1].tokens, 50]
    return PreparedPrompt(np.array(tokens, np.int32), media, np.zeros((3, len(tokens)), np.int32), 0.0)


def test_what_the_role_makes_fits() -> None:
    for of, kinds in ((VL, ()), (VL, ("image", "video")), (OMNI, ("audio", "image", "audio", "video"))):
        assert misfit(prepared(of, *kinds), of) == ""


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("image", {"tokens": 3}, "column media has 4 placeholders of kind image for 3 tokens of its features"),
        (
            "image",
            {"grid": np.array([1, 4, 6], np.int32)},
            (
                "image features uint8[16, 192] with 4 tokens do not fit their grid [1, 4, 6], which needs "
                "uint8[24, 192] and 6 tokens"
            ),
        ),
        (
            "image",
            {"grid": np.array([16, 1, 1], np.int32)},
            (
                "image features uint8[16, 192] with 4 tokens do not fit their grid [16, 1, 1], which needs "
                "uint8[16, 192] and 4 tokens"
            ),
        ),
        (
            "audio",
            {"grid": np.array([81], np.int32)},
            (
                "audio features float32[64, 80] with 10 tokens do not fit their grid [81], which needs "
                "float32[64, 81 or more] and 11 tokens"
            ),
        ),
    ],
)
def test_features_that_engines_cannot_read_are_named(kind: str, changes: dict[str, Any], said: str) -> None:
    found = prepared(OMNI, kind)
    assert misfit(replace(found, media=[replace(found.media[0], **changes)]), OMNI) == said


def test_placeholders_without_features_and_kinds_that_a_model_does_not_take_are_named() -> None:
    found = prepared(VL, "image")
    assert_says(misfit(replace(found, media=[]), VL), "column media", "4 placeholders", "image", "0 tokens")
    assert_says(misfit(prepared(OMNI, "audio"), VL), "column media", "audio", "qwen3_vl")


def test_a_sequence_holds_a_medium_of_its_prompt_whole_or_not_at_all() -> None:
    """The tokens of a video alternate with those of its sound, so neither is contiguous."""
    found = prepared(OMNI, "image", "audio")
    image, audio = (OMNI.ids[kind] for kind in ("image", "audio"))
    tokens = np.array([50, image, image, audio, image, audio, audio, 50], np.int32)
    media = [replace(found.media[0], start=1, tokens=3), replace(found.media[1], start=3, tokens=3, source=0)]
    whole = PreparedPrompt(tokens, media, np.zeros((3, 8), np.int32), 0.0)
    check_shared(whole, (0, 1, 7, 8))
    for shared, kind in ((2, "image"), (4, "image"), (5, "audio"), (6, "audio")):
        with pytest.raises(RowError) as caught:
            check_shared(whole, [shared])
        assert_says(caught.value, f"{shared} tokens", f"{kind} 1")
