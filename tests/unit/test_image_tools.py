"""The tools `zoom` and `rotate`: what they show, and what the model is told of a call that fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from relax_actors.envs import Step
from relax_actors.envs.media_bytes import png_of, with_bytes
from relax_actors.envs.observation import EnvironmentFaultError, answer_of
from relax_actors.envs.tools.images import KEPT_PIXELS, ImageEnvironment, rotated, zoomed
from relax_actors.errors import ConfigError
from tests.support.messages import assert_says

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 80, 3), np.uint8)


def play(folder: Path, *calls: tuple[str, dict[str, Any]], pixels: np.ndarray = PIXELS, **options: Any) -> list[Any]:
    """Make calls in one episode about a picture; return the content of each answer."""
    path = folder / "picture.png"
    path.write_bytes(png_of(pixels))
    environment = ImageEnvironment.build(options)

    async def run() -> list[Any]:
        environment.reset({"prompt": "?", "media": [{"kind": "image", "path": str(path)}]}, np.random.default_rng(0))
        found = []
        for name, arguments in calls:
            call = json.dumps({"name": name, "arguments": arguments})
            step = await environment.step(f"<tool_call>\n{call}\n</tool_call>")  # type: ignore[misc]
            assert isinstance(step, Step)
            found.append(step.observation[0]["content"])  # type: ignore[index, call-overload]
        return found

    return asyncio.run(run())


def pixels_of(content: Any) -> np.ndarray:
    """Decode the picture that a tool shows."""
    return cv2.imdecode(np.frombuffer(content[1]["bytes"], np.uint8), cv2.IMREAD_COLOR_RGB)


def test_a_part_is_shown_enlarged_and_can_be_named_by_later_calls(tmp_path: Path) -> None:
    first, second = play(
        tmp_path,
        ("zoom", {"box": [0.5, 0, 1, 0.5]}),
        ("rotate", {"degrees": 90, "image": 2}),
        side=80,
    )
    assert [first[0], second[0]] == [{"type": "text", "text": f"image {n}: "} for n in (2, 3)]
    part = PIXELS[:20, 40:]
    assert pixels_of(first).shape == (40, 80, 3)
    np.testing.assert_array_equal(pixels_of(first), cv2.resize(part, (80, 40), interpolation=cv2.INTER_CUBIC))
    turned = cv2.rotate(part, cv2.ROTATE_90_CLOCKWISE)
    np.testing.assert_array_equal(pixels_of(second), cv2.resize(turned, (40, 80), interpolation=cv2.INTER_CUBIC))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            ("zoom", {"box": [0, 0, 1]}),
            (
                "Error: box [0.0, 0.0, 1.0] is none; give left, top, right, bottom from 0 to 1, "
                "left < right, top < bottom"
            ),
        ),
        (
            ("zoom", {"box": [0.5, 0, 0.5, 1]}),
            (
                "Error: box [0.5, 0.0, 0.5, 1.0] is none; give left, top, right, bottom "
                "from 0 to 1, left < right, top < bottom"
            ),
        ),
        (
            ("zoom", {"box": [-9, 0, 1e300, 1]}),
            (
                "Error: box [-9.0, 0.0, 1e+300, 1.0] is none; give left, top, right, "
                "bottom from 0 to 1, left < right, top < bottom"
            ),
        ),
        (("zoom", {"box": [0, 0, 0.01, 1]}), "Error: box [0.0, 0.0, 0.01, 1.0] has 1 x 40 pixels; the least is 4 x 4"),
        (("zoom", {"box": [0, 0, 1, 1], "image": 2}), "Error: there is no image 2; images are 1 to 1"),
        (("rotate", {"degrees": 1e9}), "Error: degrees 1000000000.0 are none; give a number from -360 to 360"),
        (
            ("rotate", {"degrees": "much"}),
            (
                "Error: rotate: argument 'degrees': Input should be a valid number, unable "
                "to parse string as a number, got 'much'"
            ),
        ),
    ],
)
def test_wrong_arguments_are_answered_with_the_reason(
    tmp_path: Path, call: tuple[str, dict[str, Any]], said: str
) -> None:
    assert play(tmp_path, call) == [said]


def test_repeated_calls_are_bounded_in_number_and_size(tmp_path: Path) -> None:
    turns = [("rotate", {"degrees": 45, "image": n}) for n in range(1, 18)]
    *shown, refused = play(tmp_path, *turns, max_images=16)
    assert max(pixels_of(content).shape[0] for content in shown) <= 512
    assert_says(refused, "16 images", "answer now")
    assert max(len(content[1]["bytes"]) for content in shown) < 1 << 20
    assert rotated(np.zeros((8, 8, 3), np.uint8), 45).shape[0] ** 2 < KEPT_PIXELS


def test_options_are_checked_and_choose_the_tools() -> None:
    (schema,) = ImageEnvironment.tool_schemas({"offers": ("rotate",)})
    assert schema["function"]["name"] == "rotate"
    assert "clockwise" in schema["function"]["description"]
    with pytest.raises(ConfigError, match="side"):
        ImageEnvironment.build({"side": 5000})
    with pytest.raises(ConfigError, match="offers"):
        ImageEnvironment.build({"offers": ["crop"]})


def test_zoom_is_exact() -> None:
    np.testing.assert_array_equal(zoomed(PIXELS, (0, 0, 1, 1)), PIXELS)
    np.testing.assert_array_equal(zoomed(PIXELS, (0.25, 0.5, 0.5, 1)), PIXELS[20:, 20:40])


def test_arrays_become_files() -> None:
    for pixels in (PIXELS, PIXELS[:, :, 0]):
        (message,) = answer_of([{"type": "image", "image": pixels}], "s", 0, 1 << 20).messages
        (part,) = message["content"]
        assert part["type"] == "image"
        decoded = cv2.imdecode(np.frombuffer(part["bytes"], np.uint8), cv2.IMREAD_UNCHANGED)
        np.testing.assert_array_equal(decoded if pixels.ndim == 2 else decoded[:, :, ::-1], pixels)
    sound = np.array([0.0, 0.5, -1.0, np.nan], np.float32)
    part = with_bytes({"type": "audio", "audio": sound, "sampling_rate": 16_000})
    assert np.frombuffer(part["bytes"][44:], "<i2").tolist() == [0, 16383, -32767, 0]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            {"type": "image", "image": PIXELS.astype(float)},
            ("step() returned a picture of float64[40, 80, 3]; give [height, width] or [height, width, 3] uint8"),
        ),
        (
            {"type": "audio", "audio": np.zeros(4)},
            ("step() returned a sound as an array without sampling_rate; give it in the same part"),
        ),
        (
            {"type": "video", "video": PIXELS},
            ("step() returned an array in a part of type 'video'; give images and sounds as arrays, videos as files"),
        ),
    ],
)
def test_arrays_of_other_shapes_are_refused(part: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvironmentFaultError) as caught:
        answer_of([part], "s", 0, 1 << 20)
    assert str(caught.value) == said


def test_part_that_is_too_narrow_for_a_model_is_answered_and_not_shown(tmp_path: Path) -> None:
    """A model would refuse it, and the sample would end as if its environment had failed."""
    calls = [("zoom", {"box": box}) for box in ([0, 0, 1, 0.5], [0, 0, 0.5, 1])]
    strip = np.zeros((4, 800, 3), np.uint8)
    narrow, wide = play(tmp_path, *calls, pixels=strip, side=800, smallest=1)
    assert_says(narrow, "800 x 2", "200 times", "another part")
    assert pixels_of(wide).shape == (8, 800, 3)
