"""Families of multimodal models from the files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from relax_actors.config.media import AudioSection, ImageSection, MediaSection, VideoSection
from relax_actors.errors import ConfigError
from relax_actors.media import Family, check_settings, family_of
from relax_actors.media.families import REFUSED
from tests.support.media_models import ID, OMNI, VISION, config_of, family, save, tokenizer

ALL_IDS = {ID[text] for text in ID if "vision" in text or "audio" in text or "pad" in text}
VISION_IDS = {ID[text] for text in ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")}

PROCESSORS = "Gemma3ImageProcessor, Gemma3ImageProcessorFast, Gemma3ImageProcessorPil, "
PROCESSORS += "Glm4vImageProcessor, Glm4vImageProcessorFast, Glm4vImageProcessorPil, Glm4vVideoProcessor, "
PROCESSORS += "GotOcr2ImageProcessor, GotOcr2ImageProcessorFast, GotOcr2ImageProcessorPil, InternVLVideoProcessor, "
PROCESSORS += "Qwen2VLImageProcessor, Qwen2VLImageProcessorFast, Qwen2VLImageProcessorPil, Qwen2VLVideoProcessor, "
PROCESSORS += "Qwen3VLVideoProcessor"


def found(folder: Path) -> Family:
    of = family_of(folder)
    assert of is not None
    return of


def message(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        family_of(folder)
    return str(caught.value)


def edit(folder: Path, name: str, **fields: Any) -> None:
    path = folder / name
    body = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in (body | fields).items() if value is not None}))


@pytest.mark.parametrize("model_type", [*VISION, *OMNI])
def test_family_is_read_from_its_folder(model_type: str, tmp_path: Path) -> None:
    of = found(save(model_type, tmp_path))
    assert of.model_type == model_type
    assert of.kinds == (("image", "video", "audio") if model_type in OMNI else ("image", "video"))
    assert set(of.barred) == (ALL_IDS if model_type in OMNI else VISION_IDS)
    assert of.vision is not None
    assert (of.vision.patch, of.vision.merge, of.vision.temporal) == (8, 2, 2)


@pytest.mark.parametrize(("model_type", "whole"), [(OMNI[0], "qwen2_5_omni"), (OMNI[1], "qwen3_omni_moe")])
def test_whole_omni_model_has_the_family_of_its_thinker(model_type: str, whole: str, tmp_path: Path) -> None:
    thinker = config_of(model_type).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": whole, "thinker_config": thinker}))
    tokenizer().save_pretrained(tmp_path)
    assert found(tmp_path) == found(save(model_type, tmp_path / "thinker"))


def test_text_models_have_no_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 10}))
    assert family_of(tmp_path) is None


def test_unknown_multimodal_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "vision_config": {}}))
    said = message(tmp_path)
    for words in (
        str(tmp_path / "config.json"),
        "'llava'",
        "not supported",
        "choose one of",
        "qwen3_vl",
        "qwen3_5_moe",
    ):
        assert words in said


@pytest.mark.parametrize("model_type", REFUSED)
def test_families_that_cannot_be_supported_are_refused_with_the_reason(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vision_config": {}}))
    assert f"{model_type!r} are not supported: {REFUSED[model_type]}; choose one of" in message(tmp_path)


@pytest.mark.parametrize(
    ("fields", "vision", "processor", "words"),
    [
        ({"downsample_ratio": 0.25}, {}, {}, "downsample_ratio = 0.25 is not supported; it must be 0.5"),
        ({}, {"image_size": [32, 16]}, {}, "image_size = [32, 16] is no square of whole tokens"),
        ({}, {}, {"max_patches": 5000}, "max_patches = 5000 must lie between 1 and 64"),
    ],
)
def test_tiles_of_another_kind_are_refused(
    tmp_path: Path, fields: dict[str, Any], vision: dict[str, Any], processor: dict[str, Any], words: str
) -> None:
    ids = {"image_token_id": 0, "vision_start_token_id": 1, "vision_end_token_id": 2}
    sizes = {"image_size": [32, 32], "patch_size": [8, 8]} | vision
    edit(tmp_path, "config.json", model_type="internvl", vision_config=sizes, **ids, **fields)
    edit(tmp_path, "preprocessor_config.json", **processor)
    assert words in message(tmp_path)


def test_missing_ids_come_from_the_tokenizer(tmp_path: Path) -> None:
    save("qwen3_omni_moe_thinker", tmp_path)
    edit(tmp_path, "config.json", vision_start_token_id=None, audio_end_token_id=None)
    of = found(tmp_path)
    assert (of.ids["vision_start"], of.ids["audio_end"]) == (ID["<|vision_start|>"], ID["<|audio_end|>"])


def test_missing_placeholder_is_refused(tmp_path: Path) -> None:
    body = config_of("qwen3_vl").to_dict() | {"image_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(body, default=str))
    text = f"{tmp_path}/config.json has no image_token_id, and the tokenizer no <|image_pad|>; add one"
    assert message(tmp_path) == text


def test_processor_files_set_the_defaults(tmp_path: Path) -> None:
    save("qwen3_vl", tmp_path)
    size = {"shortest_edge": 1024, "longest_edge": 4096}
    edit(tmp_path, "preprocessor_config.json", image_processor_type="Qwen2VLImageProcessorFast", size=size)
    edit(tmp_path, "video_preprocessor_config.json", video_processor_type="Qwen3VLVideoProcessor", fps=4, max_frames=9)
    vision = found(tmp_path).vision
    assert vision is not None
    assert (vision.image_pixels, vision.fps, vision.frames) == ((1024, 4096), 4.0, (4, 9))


def test_file_of_images_is_used_for_videos_without_their_own(tmp_path: Path) -> None:
    save("qwen2_5_vl", tmp_path)
    edit(tmp_path, "preprocessor_config.json", min_pixels=784, max_pixels=7840)
    vision = found(tmp_path).vision
    assert vision is not None
    assert vision.image_pixels == vision.video_pixels == (784, 7840)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"image_processor_type": "CLIPImageProcessor"},
            f"image_processor_type = 'CLIPImageProcessor' is not supported; supported are {PROCESSORS}",
        ),
        ({"do_resize": False}, "do_resize = False is not supported; it must be True"),
        ({"resample": 2}, "resample = 2 is not supported; it must be 3"),
        ({"rescale_factor": 1.0}, "rescale_factor = 1.0 is not supported; it must be 1/255"),
    ],
)
def test_unknown_processors_and_settings_are_refused(fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    save("qwen3_vl", tmp_path)
    edit(tmp_path, "preprocessor_config.json", **fields)
    assert message(tmp_path) == f"{tmp_path / 'preprocessor_config.json'}: {text}"


def test_processor_that_contradicts_its_model_is_refused(tmp_path: Path) -> None:
    save("qwen3_vl", tmp_path)
    edit(tmp_path, "preprocessor_config.json", patch_size=14)
    needed = "patch_size of its processor is 14, and its model (vision_config) needs 8"
    assert message(tmp_path) == f"{tmp_path}: {needed}"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            MediaSection(image=ImageSection(multiple=20)),
            "image.multiple = 20 must be a multiple of the 16 pixels of a token (8 x 2)",
        ),
        (
            MediaSection(image=ImageSection(max_pixels=100)),
            "image.min_pixels = 65536 must lie between 1 and image.max_pixels = 100",
        ),
        (
            MediaSection(video=VideoSection(audio=True)),
            "video.audio is set, and a qwen3_vl model does not hear the sound of videos; switch it off",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: MediaSection, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(settings, family("qwen3_vl"))
    assert str(caught.value) == text


def test_marker_is_the_text_of_one_medium() -> None:
    tokens: Tokenizer = tokenizer().backend_tokenizer
    of = family("qwen3_omni_moe_thinker")
    assert of.marker("image", tokens) == "<|vision_start|><|image_pad|><|vision_end|>"
    assert of.marker("audio", tokens) == "<|audio_start|><|audio_pad|><|audio_end|>"


def test_audio_settings_fit_any_model() -> None:
    check_settings(MediaSection(audio=AudioSection(sample_rate=8000)), family("qwen2_5_omni_thinker"))
