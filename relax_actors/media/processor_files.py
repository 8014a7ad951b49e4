"""Settings in the processor files of a checkpoint; unknown processors are refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from relax_actors.errors import ConfigError

IMAGE = {"Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"}
VIDEO = {"Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"}
SOUND = {"WhisperFeatureExtractor"}
WHOLE = {
    "Qwen2VLProcessor",
    "Qwen2_5_VLProcessor",
    "Qwen3VLProcessor",
    "Qwen2_5OmniProcessor",
    "Qwen3OmniMoeProcessor",
    "Qwen2AudioProcessor",
}
CLASSES = {
    "processor_class": WHOLE,
    "image_processor_type": IMAGE | VIDEO,
    "video_processor_type": VIDEO,
    "feature_extractor_type": SOUND,
}
ALWAYS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3, "dither": 0.0}
RESCALE = 1 / 255
FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """Settings of the processors of images, videos and sounds, each with its file; empty where there is none."""

    where: str
    image: dict[str, Any] = field(default_factory=dict)
    video: dict[str, Any] = field(default_factory=dict)
    sound: dict[str, Any] = field(default_factory=dict)

    def must_agree(self, sizes: dict[str, int]) -> None:
        """Check the sizes of patches against those of the model.

        Raises:
            ConfigError: one differs.
        """
        for part in (self.image, self.video):
            self._compare(part, sizes, "vision_config")

    def must_agree_sound(self, sizes: dict[str, int]) -> None:
        """Check the settings of sounds against those of the model.

        Raises:
            ConfigError: one differs.
        """
        self._compare(self.sound, sizes, "audio_config")

    def _compare(self, part: dict[str, Any], sizes: dict[str, int], other: str) -> None:
        for name, value in sizes.items():
            if part.get(name, value) != value:
                msg = f"{self.where}: {name} of its processor is {part[name]}, and its model ({other}) needs {value}"
                raise ConfigError(msg)

    def channels(self, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        """Return one value a channel.

        Raises:
            ConfigError: images and videos have different ones.
        """
        found = [tuple(float(value) for value in part[name]) for part in (self.image, self.video) if name in part]
        if len({*found}) > 1:
            msg = f"{self.where}: {name} differs between images and videos: {found[0]} and {found[1]}"
            raise ConfigError(msg)
        return cast("tuple[float, float, float]", found[0] if found else default)

    def pixels(self, part: dict[str, Any], default: tuple[int, int]) -> tuple[int, int]:
        """Return the least and the most pixels."""
        size = part.get("size") or {}
        low = part.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or default[0]
        high = part.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or default[1]
        return int(low), int(high)


def read_processor_files(folder: Path) -> ProcessorFiles:
    """Read the processor files of a model folder.

    Raises:
        ConfigError: one is malformed, or names a processor or a setting that is not supported.
    """
    read = {name: _read(folder / name) for name in FILES if (folder / name).exists()}
    first = read.get("preprocessor_config.json", {})
    whole = read.get("processor_config.json", {})
    image = whole.get("image_processor") or first
    # Without a file of its own, transformers makes the processor of videos from that of images.
    video = whole.get("video_processor") or read.get("video_preprocessor_config.json") or image
    sound = whole.get("feature_extractor") or (first if "feature_extractor_type" in first else {})
    for name, part in read.items():
        _check(folder / name, part)
    for part in (image, video, sound):
        _check(folder / ("processor_config.json" if whole else FILES[0]), part)
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


def _check(path: Path, part: dict[str, Any]) -> None:
    """Check the classes and the fixed settings of one processor."""
    for key, known in CLASSES.items():
        if (name := part.get(key)) is not None and name not in known:
            msg = f"{path}: {key} = {name!r} is not supported; supported are {', '.join(sorted(known))}"
            raise ConfigError(msg)
    for key, value in ALWAYS.items():
        if part.get(key, value) != value:
            msg = f"{path}: {key} = {part[key]!r} is not supported; it must be {value!r}"
            raise ConfigError(msg)
    if abs(part.get("rescale_factor", RESCALE) - RESCALE) > 1e-9:  # noqa: PLR2004 the rounding of JSON
        msg = f"{path}: rescale_factor = {part['rescale_factor']!r} is not supported; it must be 1/255"
        raise ConfigError(msg)
