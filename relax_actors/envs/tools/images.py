"""Environment `images`: the model looks closer with the tools `zoom` and `rotate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from relax_actors.envs.media_bytes import png_of
from relax_actors.envs.tools.environment import ToolEnvironment
from relax_actors.envs.tools.functions import Tool, ToolError
from relax_actors.media.sizes import LONGEST
from relax_actors.registry.dotted import import_extra

SETTING = 'environment.name = "images"'
Pixels = NDArray[Any]
KEPT_PIXELS = 1 << 22
"""Most pixels of a result, which later calls may name."""
_SIDES = 4
_RIGHT = 90.0


def zoom(box: list[float], image: int = 1) -> None:
    """Show a part of an image, enlarged. The result can be zoomed and rotated again.

    Args:
        box: left, top, right and bottom of the part as shares of the image's width and height, from 0 to 1.
        image: number of the image: 1 is the first one of the question, results of tools follow.
    """
    raise NotImplementedError((box, image))


def rotate(degrees: float, image: int = 1) -> None:
    """Show an image rotated clockwise. The result can be zoomed and rotated again.

    Args:
        degrees: from -360 to 360.
        image: number of the image: 1 is the first one of the question, results of tools follow.
    """
    raise NotImplementedError((degrees, image))


class ImageEnvironment(ToolEnvironment):
    """Tools `zoom` and `rotate` on the images of the row. Needs the extra `media`.

    A call that names no image or no box is answered with the reason.

    Attributes:
        offers: the tools that the model may call.
        side: pixels of the longer side of what tools show. An image of more than 590 pixels can have more bytes than
            the default of environment.max_observation_bytes.
        smallest: least pixels of a part's sides.
        max_images: most images that tools show in an episode.
    """

    tools: ClassVar[Sequence[Callable[..., Any] | Tool]] = (zoom, rotate)
    offers: Annotated[tuple[Literal["zoom", "rotate"], ...], Field(min_length=1)] = ("zoom", "rotate")
    side: Annotated[int, Field(ge=16, le=800)] = 512
    smallest: Annotated[int, Field(gt=0)] = 4
    max_images: Annotated[int, Field(gt=0)] = 16

    _images: list[Pixels]

    @classmethod
    def tool_schemas(cls, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools that are offered."""
        return [Tool(tool).schema for tool in (zoom, rotate) if tool.__name__ in options["offers"]]

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Check that images can be decoded; raises ConfigError without the extra `media`."""
        super().check_options(options)
        import_extra("cv2", "media", SETTING)

    def reset(self, task: Mapping[str, Any], rng: np.random.Generator) -> Any:
        """Begin with the data's prompt."""
        self._images = images_of(task)
        self._given = len(self._images)
        return super().reset(task, rng)

    def make_tools(self) -> Sequence[Callable[..., Any] | Tool]:
        """Return the tools that are offered, on the images of the episode."""

        def crop(box: list[float], image: int = 1) -> list[dict[str, Any]]:
            return self._show(zoomed(self._image(image), box, smallest=self.smallest))

        def turn(degrees: float, image: int = 1) -> list[dict[str, Any]]:
            return self._show(rotated(self._image(image), degrees))

        crop.__doc__, turn.__doc__ = zoom.__doc__, rotate.__doc__
        tools = {"zoom": Tool(crop, "zoom"), "rotate": Tool(turn, "rotate")}
        return [tool for name, tool in tools.items() if name in self.offers]

    def _image(self, number: int) -> Pixels:
        if not 1 <= number <= len(self._images):
            msg = f"there is no image {number}; images are 1 to {len(self._images)}"
            raise ToolError(msg if self._images else "the question has no image")
        return self._images[number - 1]

    def _show(self, pixels: Pixels) -> list[dict[str, Any]]:
        if len(self._images) - self._given >= self.max_images:
            msg = f"{self.max_images} images have been shown, no more are; answer now"
            raise ToolError(msg)
        shown = scaled(pixels, self.side)
        height, width = shown.shape[:2]
        if max(height, width) > LONGEST * min(height, width):  # no model takes it
            msg = f"{width} x {height} pixels: one side is more than {LONGEST} times the other; show another part"
            raise ToolError(msg)
        area = pixels.shape[0] * pixels.shape[1]
        if area > KEPT_PIXELS:  # repeated rotations would make images that grow and grow
            pixels = scaled(pixels, int(max(pixels.shape[:2]) * (KEPT_PIXELS / area) ** 0.5))
        self._images.append(pixels)
        return [{"type": "text", "text": f"image {len(self._images)}: "}, {"type": "image", "bytes": png_of(shown)}]


def images_of(task: Mapping[str, Any]) -> list[Pixels]:
    """Return a task's images, `[height, width, 3] uint8`; raises RowError if undecodable."""
    return [_loaded(medium["path"]).copy() for medium in task.get("media", ()) if medium["kind"] == "image"]


@lru_cache(maxsize=4)
def _loaded(path: str) -> Pixels:
    """Return an image; the sessions of a process often have the same one."""
    from relax_actors.media import load_image  # noqa: PLC0415 loads OpenCV

    return load_image(path)


def zoomed(pixels: Pixels, box: Sequence[float], *, smallest: int = 1) -> Pixels:
    """Return a part of an image.

    Args:
        pixels: `[height, width, 3] uint8`.
        box: left, top, right and bottom as shares of width and height.
        smallest: least pixels of a part's sides.

    Raises:
        ToolError: the box is none, or smaller than `smallest`.
    """
    if len(box) != _SIDES or not all(0 <= side <= 1 for side in box) or box[0] >= box[2] or box[1] >= box[3]:
        msg = f"box {list(box)!r:.80} is none; give left, top, right, bottom from 0 to 1, left < right, top < bottom"
        raise ToolError(msg)
    height, width = pixels.shape[:2]
    left, top, right, bottom = (round(share * size) for share, size in zip(box, (width, height) * 2, strict=True))
    if right - left < smallest or bottom - top < smallest:
        msg = f"box {list(box)!r:.80} has {right - left} x {bottom - top} pixels; the least is {smallest} x {smallest}"
        raise ToolError(msg)
    return np.ascontiguousarray(pixels[top:bottom, left:right])


def scaled(pixels: Pixels, side: int) -> Pixels:
    """Return an image whose longer side has this number of pixels."""
    import cv2  # noqa: PLC0415 with the extra `media`

    height, width = pixels.shape[:2]
    scale = side / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    resized: Pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_CUBIC if scale > 1 else cv2.INTER_AREA)
    return resized


def rotated(pixels: Pixels, degrees: float) -> Pixels:
    """Return an image rotated clockwise, with black corners; raises ToolError beyond 360."""
    import cv2  # noqa: PLC0415 with the extra `media`

    if not -4 * _RIGHT <= degrees <= 4 * _RIGHT:
        msg = f"degrees {degrees!r:.40} are none; give a number from -360 to 360"
        raise ToolError(msg)
    if degrees % _RIGHT == 0:
        return np.ascontiguousarray(np.rot90(pixels, -int(degrees // _RIGHT)))
    height, width = pixels.shape[:2]
    matrix: NDArray[Any] = cv2.getRotationMatrix2D((width / 2, height / 2), -degrees, 1.0)
    cos, sin = abs(matrix[0, 0]), abs(matrix[0, 1])
    across, down = round(height * sin + width * cos), round(height * cos + width * sin)
    matrix[:, 2] += across / 2 - width / 2, down / 2 - height / 2
    turned: Pixels = cv2.warpAffine(pixels, matrix, (across, down))
    return turned
