"""Images and prompts of Gemma 3 are those of its processor in transformers."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from relax_actors.config.media import ImageSection, MediaSection
from relax_actors.errors import ConfigError, RowError
from relax_actors.media import Family, Features, expand, family_of, process
from relax_actors.media.normalise import pixel_values, tiles_of
from relax_actors.media.processor_writer import write_processor_files
from tests.support.media_files import image_file, picture
from tests.support.tiny_media_models import SQUARE, TEXT

SPECIAL = ["<start_of_image>", "<end_of_image>", "<image_soft_token>", "<turn>"]
CHARACTERS = "abcd \n"
needs_torchvision = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="without torchvision transformers resizes with Pillow: make sglang"
)


def tokenizer(characters: str = CHARACTERS) -> Tokenizer:
    """Return a tokenizer of characters that has tokens for several new lines, as Gemma's has."""
    made = Tokenizer(models.WordLevel({c: n for n, c in enumerate(["?", *characters])}, unk_token="?"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(SPECIAL)
    if "\n" in characters:
        made.add_tokens([AddedToken("\n" * n, normalized=False) for n in range(2, 6)])
    return made


def family(folder: Path, *, tokens: int = 4, **processor: Any) -> Family:
    """Write a folder with the files of a tiny model, and return its family."""
    ids = {text: tokenizer().token_to_id(text) for text in SPECIAL}
    fields = {"model_type": "gemma3", "text_config": TEXT, "vision_config": SQUARE, "mm_tokens_per_image": tokens}
    fields |= {"image_token_index": ids[SPECIAL[2]]}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    tokenizer().save(str(folder / "tokenizer.json"))
    found = family_of(folder)
    assert found is not None
    assert found.ids == {"vision_start": ids[SPECIAL[0]], "vision_end": ids[SPECIAL[1]], "image": ids[SPECIAL[2]]}
    return found


def processor_of(theirs: Any) -> Any:
    """Return the processor of transformers."""
    images = theirs.Gemma3ImageProcessor(size={"height": 32, "width": 32})
    named = {"boi_token": SPECIAL[0], "eoi_token": SPECIAL[1], "image_token": SPECIAL[2]}
    text = theirs.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), extra_special_tokens=named)
    return theirs.Gemma3Processor(images, text, image_seq_length=4)


@needs_torchvision
@pytest.mark.parametrize("size", [(40, 30), (9, 5), (300, 200), (61, 911)])
def test_pixels_are_those_of_transformers(tmp_path: Path, size: tuple[int, int]) -> None:
    processor = processor_of(transformers).image_processor
    of, image = family(tmp_path, **processor.to_dict()), picture(*size)
    assert of.vision is not None
    (found,) = process(image_file(image, "PNG"), "image", of, MediaSection())
    assert found.grid.tolist() == [1, 4, 4]
    tiles = tiles_of(pixel_values(torch.from_numpy(found.array), of.vision), of.vision)
    assert tiles.equal(processor(images=[image], return_tensors="pt")["pixel_values"])


@needs_torchvision
def test_written_files_make_the_processor_of_transformers(tmp_path: Path) -> None:
    theirs: Any = transformers
    write_processor_files(tmp_path, family(tmp_path), MediaSection())
    expected, image = processor_of(theirs).image_processor, picture(40, 30)
    found = theirs.AutoImageProcessor.from_pretrained(tmp_path)
    pixels = [one(images=[image], return_tensors="pt")["pixel_values"] for one in (found, expected)]
    assert pixels[0].equal(pixels[1])
    assert json.loads((tmp_path / "processor_config.json").read_text())["image_seq_length"] == 4
    assert family_of(tmp_path) is not None


@needs_torchvision
@pytest.mark.parametrize("text", ["a<i>b", "<i>", "ab\n<i>\nc\n\n<i><i>d", "<turn>a\n<i><turn>\n", "<i>\n\n<turn><i>a"])
def test_text_around_images_is_tokenized_with_its_neighbours(tmp_path: Path, text: str) -> None:
    of, prompt = family(tmp_path), text.replace("<i>", SPECIAL[0])
    count = prompt.count(SPECIAL[0])
    images = [Features("image", np.zeros((16, 192), np.uint8), np.array([1, 4, 4], np.int32))] * count
    whole = expand(np.array(tokenizer().encode(prompt).ids, np.int32), images, of, tokenizer())
    theirs = processor_of(transformers)(text=[prompt], images=[[picture(9, 5)] * count], return_tensors="np")
    assert whole.tokens.tolist() == theirs["input_ids"][0].tolist()
    assert [whole.tokens[start : start + 4].tolist() for start in whole.starts] == [[of.ids["image"]] * 4] * count
    np.testing.assert_array_equal(whole.positions, np.tile(np.arange(len(whole.tokens)), (3, 1)))


def test_tokens_that_no_text_gives_stay(tmp_path: Path) -> None:
    """A sampled text may have two tokens where the tokenizer would write one."""
    of, one = family(tmp_path), tokenizer()
    image = Features("image", np.zeros((16, 192), np.uint8), np.array([1, 4, 4], np.int32))
    new_line, mark = one.token_to_id("\n"), of.ids["vision_start"]
    whole = expand(np.array([new_line, new_line, mark, new_line], np.int32), [image], of, one)
    assert whole.tokens.tolist() == [
        new_line,
        new_line,
        one.token_to_id("\n\n"),
        mark,
        *[of.ids["image"]] * 4,
        of.ids["vision_end"],
        one.token_to_id("\n\n\n"),
    ]


def test_placeholders_in_text_are_refused(tmp_path: Path) -> None:
    of, one = family(tmp_path), tokenizer()
    image = Features("image", np.zeros((16, 192), np.uint8), np.array([1, 4, 4], np.int32))
    for text, media in ((f"a{SPECIAL[2]}", []), (f"a{SPECIAL[2]}{SPECIAL[0]}", [image])):
        with pytest.raises(RowError, match="the text holds <image_soft_token>, which only features of image may"):
            expand(np.array(one.encode(text).ids, np.int32), media, of, one)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan = True is not supported; it must be False"),
        ({"do_normalize": None}, "do_normalize = None is not supported; it must be True"),
        ({"resample": 3}, "resample = 3 is not supported; it must be 2"),
        ({"size": {"height": 64, "width": 64}}, "and its model (vision_config) reads 32 x 32"),
        ({"tokens": 3}, "mm_tokens_per_image = 3 does not divide an image"),
        ({"tokens": 9}, "mm_tokens_per_image = 9 does not divide an image"),
    ],
)
def test_settings_of_another_kind_are_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        family(tmp_path, **fields)
    assert words in str(caught.value)


def test_prompts_without_new_lines_in_the_tokenizer_and_bounds_of_pixels_are_refused(tmp_path: Path) -> None:
    of = family(tmp_path)
    (image,) = process(image_file(picture(9, 5), "PNG"), "image", of, MediaSection())
    with pytest.raises(RowError, match=r"reads '\\n\\n' around an image.* model.tokenizer.alphabet"):
        expand(np.array([of.ids["vision_start"]], np.int32), [image], of, tokenizer("abcd "))
    with pytest.raises(ConfigError, match="have no effect with a model of type gemma3"):
        process(image_file(picture(9, 5), "PNG"), "image", of, MediaSection(image=ImageSection(min_pixels=4096)))
    with pytest.raises(RowError, match="a gemma3 model takes no video; it takes image"):
        process(image_file(picture(9, 5), "PNG"), "video", of, MediaSection())
