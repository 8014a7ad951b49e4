"""Images of every kind become upright RGB arrays, and bad files end with the reason."""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from relax_actors.config.media import ImageSection, LimitsSection, MediaSection
from relax_actors.errors import ConfigError, RowError, SlowRowError
from relax_actors.media import expand, family_of, process
from relax_actors.media.decode_image import decode_image
from relax_actors.media.normalise import pixel_values, tiles_of
from relax_actors.media.source import Source
from tests.support.media_files import frames_of, gif_file, image_file, picture, tone, video_file, wav_file
from tests.support.media_models import family
from tests.support.messages import assert_says
from tests.support.tiny_media_models import HALF_TURNED, TEXT, TILES, VISION_GLM

PICTURE = picture()

needs_torchvision = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="without torchvision transformers resizes with Pillow: make sglang"
)


def decoded(data: bytes, limits: LimitsSection | None = None) -> np.ndarray:
    return decode_image(Source(data, "a.png", limits or LimitsSection()))


def message(data: bytes, limits: LimitsSection | None = None) -> str:
    with pytest.raises(RowError) as caught:
        decoded(data, limits)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "WEBP"])
def test_lossless_formats_keep_every_pixel(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    assert np.array_equal(decoded(image_file(PICTURE, kind, **options)), PICTURE)


@pytest.mark.parametrize(("kind", "mode", "most"), [("JPEG", "RGB", 4), ("JPEG", "CMYK", 6), ("TIFF", "CMYK", 1)])
def test_colours_are_right(kind: str, mode: str, most: int) -> None:
    options = {"quality": 98, "subsampling": 0} if kind == "JPEG" else {}
    pixels = decoded(image_file(Image.fromarray(PICTURE).convert(mode), kind, **options))
    assert np.abs(pixels.astype(int) - PICTURE).max() <= most


def test_grey_becomes_three_equal_channels() -> None:
    for kind in ("PNG", "JPEG"):
        pixels = decoded(image_file(Image.fromarray(PICTURE).convert("L"), kind))
        assert pixels.shape == PICTURE.shape
        assert (pixels == pixels[:, :, :1]).all()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_become_eight(kind: str) -> None:
    deep = Image.fromarray(PICTURE[:, :, 0].astype(np.uint16) * 257)
    pixels = decoded(image_file(deep, kind))
    assert pixels.dtype == np.uint8
    assert np.abs(pixels[:, :, 1].astype(int) - PICTURE[:, :, 0]).max() <= 1


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_transparent_pixels_lie_on_white(kind: str) -> None:
    image = Image.fromarray(PICTURE).convert("RGBA")
    alpha = np.linspace(0, 255, 80, dtype=np.uint8)[None].repeat(60, axis=0)
    image.putalpha(Image.fromarray(alpha))
    pixels = decoded(image_file(image, kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {})))
    share = alpha[:, :, None] / 255
    assert np.abs(pixels - (PICTURE * share + 255 * (1 - share))).max() <= 1


def test_transparent_colour_of_a_palette_lies_on_white() -> None:
    image = Image.new("P", (4, 2), 1)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((0, 0), 0)
    pixels = decoded(image_file(image, "PNG", transparency=0))
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[1, 1].tolist() == [0, 0, 255]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_exif_is_applied(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    turns = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
    upright = Image.fromarray(PICTURE)
    if orientation in turns:
        upright = upright.transpose(Image.Transpose(turns[orientation]))
    pixels = decoded(image_file(PICTURE, kind, exif=exif, quality=98))
    assert pixels.shape == np.asarray(upright).shape
    assert np.abs(pixels.astype(int) - np.asarray(upright)).mean() < 4


def test_alpha_is_turned_with_its_image() -> None:
    exif = Image.Exif()
    exif[0x112] = 6
    image = Image.fromarray(PICTURE).convert("RGBA")
    alpha = np.full((60, 80), 255, np.uint8)
    alpha[:5, :7] = 0
    image.putalpha(Image.fromarray(alpha))
    pixels = decoded(image_file(image, "PNG", exif=exif))
    assert pixels.shape == (80, 60, 3)
    assert (pixels[:7, -5:] == 255).all()


def test_image_of_an_animation_is_its_first_frame() -> None:
    pixels = decoded(gif_file(4))
    assert pixels.shape == PICTURE.shape
    assert np.abs(pixels.astype(int) - PICTURE).mean() < 12


@needs_torchvision
@pytest.mark.parametrize("size", [(40, 30), (9, 5), (300, 200), (61, 911)])
def test_images_and_positions_of_glm4v_are_those_of_transformers(tmp_path: Path, size: tuple[int, int]) -> None:
    theirs: Any = transformers
    config = theirs.Glm4vConfig(
        image_token_id=0,
        vision_start_token_id=1,
        vision_end_token_id=2,
        text_config=TEXT | {"rope_parameters": HALF_TURNED, "vocab_size": 8},
        vision_config=VISION_GLM,
    )
    limits = {"shortest_edge": 2000, "longest_edge": 40_000}
    processor = theirs.Glm4vImageProcessor(patch_size=8, size=limits)
    for one in (config, processor):
        one.save_pretrained(tmp_path)
    of, image = family_of(tmp_path), picture(*size)
    assert of is not None and of.vision is not None  # noqa: PT018 a model that sees
    assert of.kinds == ("image",)
    (found,) = process(image_file(image, "PNG"), "image", of, MediaSection())
    expected = processor(images=[image], return_tensors="pt")
    assert [found.grid.tolist()] == expected["image_grid_thw"].tolist()
    pixels = pixel_values(torch.from_numpy(found.array), of.vision)
    assert pixels.equal(expected["pixel_values"])
    placed = expand(np.array([4, 1, 0, 2, 5], np.int32), [found], of, Tokenizer(WordLevel()))
    tokens = torch.from_numpy(placed.tokens).long()[None]
    of_model = theirs.Glm4vModel(config).get_rope_index
    positions, delta = of_model(tokens, (tokens == 0).int(), expected["image_grid_thw"])
    np.testing.assert_array_equal(placed.positions, positions[:, 0])
    assert placed.delta == float(delta)
    with pytest.raises(RowError, match=r"a glm4v model takes no video here \(its frames .*\); it takes image"):
        process(image_file(image, "PNG"), "video", of, MediaSection())


@needs_torchvision
@pytest.mark.parametrize("size", [(40, 30), (9, 5), (300, 200), (61, 911), (128, 64)])
def test_tiles_of_internvl_are_those_of_transformers(tmp_path: Path, size: tuple[int, int]) -> None:
    theirs: Any = transformers
    text = {"model_type": "qwen2"} | TEXT | {"vocab_size": 8}
    config = theirs.InternVLConfig(
        image_token_id=0, vision_start_token_id=1, vision_end_token_id=2, text_config=text, vision_config=TILES
    )
    processor = theirs.GotOcr2ImageProcessor(
        size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=6, image_mean=[0.4, 0.5, 0.6]
    )
    for one in (config, processor):
        one.save_pretrained(tmp_path)
    of, image = family_of(tmp_path), picture(*size)
    assert of is not None and of.vision is not None  # noqa: PT018 a model that sees
    (found,) = process(image_file(image, "PNG"), "image", of, MediaSection())
    expected = processor(images=[image], return_tensors="pt")
    tiles = tiles_of(pixel_values(torch.from_numpy(found.array), of.vision), of.vision)
    assert tiles.equal(expected["pixel_values"])
    placed = expand(np.array([4, 0, 5], np.int32), [found], of, Tokenizer(WordLevel()))
    count = 4 * len(tiles)  # a token for four of the 16 patches of a tile
    assert placed.tokens.tolist() == [4, 1, *[0] * count, 2, 5]
    assert (placed.starts, placed.counts, placed.delta) == ((2,), (count,), 0)
    assert placed.positions.tolist() == [list(range(count + 4))] * 3
    with pytest.raises(RowError, match=r"model takes no video here \(its frames are images .*\); it takes image"):
        process(image_file(image, "PNG"), "video", of, MediaSection())
    with pytest.raises(ConfigError, match="have no effect with a model of type internvl"):
        process(image_file(image, "PNG"), "image", of, MediaSection(image=ImageSection(max_pixels=4096)))


@pytest.mark.parametrize("size", [(1, 1), (1, 150), (3, 5), (37, 911), (4000, 3000)])
def test_images_of_any_size_become_whole_tokens(size: tuple[int, int]) -> None:
    of = family("qwen3_vl")
    settings = MediaSection(image=ImageSection(min_pixels=256, max_pixels=64 * 64))
    (features,) = process(image_file(picture(*size), "BMP"), "image", of, settings)
    t, h, w = features.grid.tolist()
    assert t == 1
    assert h % 2 == w % 2 == 0
    assert features.array.shape == (h * w, 3 * 8 * 8)
    assert h * w * 64 <= 64 * 64 or min(h, w) == 2
    assert (features.height, features.width) == size


def test_sides_become_multiples_of_the_setting() -> None:
    settings = MediaSection(image=ImageSection(min_pixels=256, max_pixels=10**6, multiple=48))
    (features,) = process(image_file(picture(100, 130)), "image", family("qwen3_vl"), settings)
    assert features.grid.tolist() == [1, 96 // 8, 144 // 8]


def test_too_narrow_image_is_refused() -> None:
    with pytest.raises(RowError) as caught:
        process(image_file(picture(1, 201)), "image", family("qwen3_vl"), MediaSection(), name="a.png")
    assert_says(caught.value, "a.png", "201 x 1", "200", "crop")


def bomb_png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0) + b"\0" * 64


def resized_header(kind: str) -> bytes:
    """Return an image file whose header says 60,000 x 60,000 pixels."""
    data = bytearray(image_file(PICTURE, kind))
    if kind == "JPEG":
        at = data.index(b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack(">HH", 60_000, 60_000)
    elif kind == "GIF":
        data[6:10] = struct.pack("<HH", 60_000, 60_000)
    elif kind == "BMP":
        data[18:26] = struct.pack("<ii", 60_000, 60_000)
    elif kind == "TIFF":
        for tag in (256, 257):
            at = data.index(struct.pack("<HHI", tag, 4 if struct.pack("<HHI", tag, 4, 1) in data else 3, 1))
            data[at : at + 12] = struct.pack("<HHII", tag, 4, 1, 60_000)
    else:
        image = Image.fromarray(PICTURE).convert("RGBA")
        image.putalpha(128)
        data = bytearray(image_file(image, "WEBP"))
        at = data.index(b"VP8X") + 12
        data[at : at + 6] = (59_999).to_bytes(3, "little") * 2
    return bytes(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_decompression_bomb_is_refused_by_its_header(kind: str) -> None:
    data = bomb_png(60_000, 60_000) if kind == "PNG" else resized_header(kind)
    before = time.process_time()
    text = "a.png: 60000 x 60000 pixels exceed the limit of 50000000 pixels; reduce it or raise the limit"
    assert message(data) == text
    assert time.process_time() - before < 0.5


@pytest.mark.parametrize("part", [0.3, 0.7, 0.99])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "BMP", "WEBP"])
def test_truncated_image_is_refused(kind: str, part: float) -> None:
    data = image_file(picture(300, 400), kind, **({"lossless": True} if kind == "WEBP" else {}))
    text = message(data[: int(len(data) * part)])
    assert text.startswith("a.png: ")
    assert "truncated" in text or "cut off" in text


def test_other_kinds_of_files_are_named() -> None:
    other = "an image is expected, and this is"
    assert_says(message(wav_file(tone())), "a.png", other, "wav")
    assert_says(message(video_file(frames_of(2))), "a.png", other, "mp4")
    known = "no PNG, JPEG, GIF, WebP, TIFF or BMP"
    assert message(b"hello, I am a text") == f"a.png: {other} {known} or cut off in its header"


def test_missing_empty_and_large_files_are_refused(tmp_path: Path) -> None:
    of, path = family("qwen3_vl"), tmp_path / "a.png"
    with pytest.raises(RowError) as caught:
        process(path, "image", of, MediaSection())
    assert_says(caught.value, path, "No such file")
    path.touch()
    with pytest.raises(RowError) as caught:
        process(path, "image", of, MediaSection())
    assert str(caught.value) == f"{path}: the file is empty"
    path.write_bytes(image_file(PICTURE, "BMP"))
    with pytest.raises(RowError) as caught:
        process(path, "image", of, MediaSection(limits=LimitsSection(max_bytes=100)))
    assert_says(caught.value, path, "14454", "100 bytes", "raise the limit")


def test_deadline_ends_decoding() -> None:
    with pytest.raises(SlowRowError) as caught:
        process(
            image_file(PICTURE),
            "image",
            family("qwen3_vl"),
            MediaSection(),
            name="a.png",
            deadline=0.0,
        )
    text = "a.png: decoding took longer than the deadline of the medium; shorten it or allow more time"
    assert str(caught.value) == text


def test_damaged_bytes_end_with_an_image_or_a_reason() -> None:
    random = np.random.default_rng(0)
    for number in range(120):
        kind = ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"][number % 6]
        data = bytearray(image_file(PICTURE, kind))
        for place in random.integers(0, len(data), 1 + number % 7):
            data[place] = random.integers(0, 256)
        with suppress(RowError):
            assert decoded(bytes(data)).dtype == np.uint8


@pytest.mark.parametrize("settings", [{"min_pixels": 10**12, "max_pixels": 10**12}, {"multiple": 16 << 20}])
def test_settings_that_enlarge_an_image_without_bound_are_refused(settings: dict[str, int]) -> None:
    chosen = MediaSection(image=ImageSection(**settings))
    with pytest.raises(RowError, match=r"^a\.png: .*\d+ x \d+ pixels, more than the limit of "):
        process(image_file(PICTURE), "image", family("qwen3_vl"), chosen, name="a.png")


def test_a_repeated_tag_of_a_tiff_does_not_hide_its_size() -> None:
    data = bytearray(image_file(PICTURE, "TIFF"))
    (start,) = struct.unpack_from("<I", data, 4)
    (entries,) = struct.unpack_from("<H", data, start)
    width = next(at for at in range(start + 2, start + 2 + 12 * entries, 12) if data[at : at + 2] == b"\x00\x01")
    fields = bytes(data[start + 2 : start + 2 + 12 * entries])
    small = bytes(data[width : width + 8]) + struct.pack("<I", 1)
    table = struct.pack("<H", entries + 1) + fields + small + bytes(4)
    data[4:8] = struct.pack("<I", len(data))
    limits = LimitsSection(max_pixels=PICTURE.shape[0] * PICTURE.shape[1] - 1)
    said = message(bytes(data) + table, limits)
    assert_says(said, "a.png", "80 x 60", "4799", "raise the limit")
