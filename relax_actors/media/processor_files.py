"""Settings in the processor files of a checkpoint; unknown processors are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

from relax_actors.errors import ConfigError
from relax_actors.media.families import FAMILIES, VisionSpec

SOUND = "WhisperFeatureExtractor"
_KNOWN = [spec.processors for spec in FAMILIES.values()]
_VARIANTS = ("", "Fast", "Pil")
IMAGE = {known.image + variant for known in _KNOWN if known.image for variant in _VARIANTS}
VIDEO = {known.video for known in _KNOWN if known.video}
CLASSES = {
    "processor_class": {known.whole for known in _KNOWN},
    "image_processor_type": IMAGE | VIDEO,
    "video_processor_type": VIDEO,
    "feature_extractor_type": {SOUND},
}
"""Known classes by the field that names them."""
ALWAYS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_pan_and_scan": False, "dither": 0.0}
"""Settings that must have these values, if a file has them."""
RESAMPLE = {"bilinear": 2, "bicubic": 3}
"""Numbers of PIL for `VisionSpec.resampling`."""
RESCALE = 1 / 255
MOST_TILES = 64
FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """Settings of processors of images, videos and sounds, with their files."""

    where: str
    image: dict[str, Any]
    video: dict[str, Any]
    sound: dict[str, Any]

    def must_agree(self, sizes: dict[str, int], section: str) -> None:
        """Check settings against those of the model.

        Args:
            sizes: settings of the model.
            section: the part of its config that has them, "vision_config" or "audio_config".

        Raises:
            ConfigError: one differs.
        """
        parts = (self.sound,) if section == "audio_config" else (self.image, self.video)
        for part, (name, value) in product(parts, sizes.items()):
            if part.get(name, value) != value:
                msg = f"{self.where}: {name} of its processor is {part[name]}, and its model ({section}) needs {value}"
                raise ConfigError(msg)

    def channels(self, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        """Return one value a channel; raises ConfigError if images and videos have different ones."""
        values = [tuple(float(value) for value in part[name]) for part in (self.image, self.video) if name in part]
        if len({*values}) > 1:
            msg = f"{self.where}: {name} differs between images and videos: {values[0]} and {values[1]}"
            raise ConfigError(msg)
        return cast("tuple[float, float, float]", values[0] if values else default)

    def pixels(self, part: dict[str, Any], default: tuple[int, int]) -> tuple[int, int]:
        """Return the least and the most pixels."""
        size = part.get("size") or {}
        low = part.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or default[0]
        high = part.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or default[1]
        return int(low), int(high)

    def must_be_square(self, side: int) -> None:
        """Check that images become squares of so many pixels a side; raises ConfigError if they do not."""
        size = self.image.get("size") or {}
        if any(size.get(name, side) != side for name in ("height", "width")):
            msg = f"{self.where}: size of its processor is {size}, and its model (vision_config) reads {side} x {side}"
            raise ConfigError(msg)

    def tiles(self, default: tuple[int, int]) -> tuple[int, int]:
        """Return the least and the most tiles of an image; raises ConfigError for too many."""
        least, most = (
            int(self.image.get(f"{name}_patches", n)) for name, n in zip(("min", "max"), default, strict=True)
        )
        if not 1 <= least <= most <= MOST_TILES:
            msg = f"{self.where}: min_patches = {least} and max_patches = {most} must lie between 1 and {MOST_TILES}"
            raise ConfigError(msg)
        return least, most


def read_processor_files(folder: Path, vision: VisionSpec | None) -> ProcessorFiles:
    """Read the processor files of a model; raises ConfigError for malformed and unsupported ones."""
    fixed = ALWAYS | ({} if vision is None else {"resample": RESAMPLE[vision.resampling]})
    read = {name: _read(folder / name) for name in FILES if (folder / name).exists()}
    first = read.get("preprocessor_config.json", {})
    whole = read.get("processor_config.json", {})
    image = whole.get("image_processor") or first
    # Without a file of its own, transformers makes the processor of videos from that of images.
    video = whole.get("video_processor") or read.get("video_preprocessor_config.json") or image
    sound = whole.get("feature_extractor") or (first if "feature_extractor_type" in first else {})
    for name, part in read.items():
        _check(folder / name, part, fixed)
    for part in (image, video, sound):
        _check(folder / ("processor_config.json" if whole else FILES[0]), part, fixed)
    return ProcessorFiles(str(folder), image, video, sound)


def _read(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read: {error}"
        raise ConfigError(msg) from error
    if not isinstance(body, dict):
        msg = f"{path} is not an object"
        raise ConfigError(msg)
    return body


def _check(path: Path, part: dict[str, Any], fixed: Mapping[str, Any]) -> None:
    """Check the classes and the `fixed` settings of one processor."""
    for key, known in CLASSES.items():
        if (name := part.get(key)) is not None and name not in known:
            msg = f"{path}: {key} = {name!r} is not supported; supported are {', '.join(sorted(known))}"
            raise ConfigError(msg)
    for key, value in fixed.items():
        # Without a value the class does what it does by default, which is to leave such a step out.
        if (given := part.get(key, value)) != value and not (given is None and value is False):
            msg = f"{path}: {key} = {given!r} is not supported; it must be {value!r}"
            raise ConfigError(msg)
    if abs(part.get("rescale_factor", RESCALE) - RESCALE) > 1e-9:  # noqa: PLR2004 the rounding of JSON
        msg = f"{path}: rescale_factor = {part['rescale_factor']!r} is not supported; it must be 1/255"
        raise ConfigError(msg)
