"""Processing of one medium: from raw bytes to features."""

from __future__ import annotations

from pathlib import Path

from relax_actors.config.media import ImageSection, MediaSection, VideoSection
from relax_actors.errors import ConfigError
from relax_actors.media.families import VisionSpec
from relax_actors.media.family import Family
from relax_actors.media.features import Features
from relax_actors.media.sizes import SizeError
from relax_actors.media.source import Source, read_source
from relax_actors.messages.media import AUDIO, IMAGE, VIDEO


def process(
    source: bytes | Path,
    kind: str,
    family: Family,
    settings: MediaSection,
    *,
    name: str = "",
    start: float = 0.0,
    end: float | None = None,
    deadline: float = float("inf"),
) -> tuple[Features, ...]:
    """Decode one medium and compute its features; a video with its sound gives two.

    Size, duration and number of frames are checked against the limits before decoding, and memory stays within what
    the sampled frames need. The deadline is checked between frames; one image is bounded by its pixels.

    Args:
        source: path or bytes of the raw medium.
        kind: one of `KINDS_OF_MEDIA`.
        family: the model.
        settings: settings of all kinds, and limits of the raw medium.
        name: origin of bytes, for errors.
        start: seconds at which a video or sound begins.
        end: seconds at which it ends.
        deadline: time of the monotonic clock after which decoding fails.

    Raises:
        RowError: the medium cannot be read or decoded, exceeds a limit, or the model does not take its kind.
        ConfigError: the settings do not fit the model.
    """
    raw = read_source(source, name, settings.limits, deadline)
    if kind not in family.kinds:
        taken = ", ".join(family.kinds)
        why = f" here ({family.spec.absent[kind]})" if kind in family.spec.absent else ""
        raw.refuse(f"a {family.model_type} model takes no {kind}{why}; it takes {taken}")
    check_settings(settings, family)
    if end is not None and not 0 <= start < end:
        raw.refuse(f"the part from {start:g} s to {end:g} s is empty")
    try:
        return _process(raw, kind, family, settings, (start, end))
    except SizeError as error:
        raw.refuse(str(error), error)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):  # of torch
            raise
        raw.refuse("decoding needs more memory than the process may use; shrink the file or raise the limit", error)


def _process(
    raw: Source, kind: str, family: Family, settings: MediaSection, part: tuple[float, float | None]
) -> tuple[Features, ...]:
    # Imported here, because they load decoders and torch.
    frames: tuple[Features, ...] = ()
    if kind != AUDIO and family.vision is not None:
        from relax_actors.media.vision import image_features, video_features  # noqa: PLC0415

        if kind == IMAGE:
            return (image_features(raw, family.vision, settings.image),)
        frames = (video_features(raw, family.vision, settings.video, part),)
        if not settings.video.audio:
            return frames
    if family.audio is None:
        raw.refuse(f"a {family.model_type} model takes no sound")
    from relax_actors.media.sound import sound_features  # noqa: PLC0415

    sound = sound_features(raw, family.audio, settings.audio, part, inside=bool(frames))
    if sound is not None:
        return (*frames, sound)
    return frames or raw.refuse("the file has no sound")


def check_settings(settings: MediaSection, family: Family) -> None:
    """Check that settings fit a model; raises ConfigError if they do not."""
    image = settings.image
    if family.vision is not None and family.vision.tile and (image.min_pixels or image.max_pixels or image.multiple):
        msg = (
            f"image.min_pixels, max_pixels and multiple have no effect with a model of type {family.model_type}, which "
            f"cuts images into tiles of {family.vision.tile} pixels a side; leave them out"
        )
        raise ConfigError(msg)
    if family.vision is not None:
        _check_pixels(IMAGE, settings.image, family.vision.image_pixels[0], family.vision)
        _check_pixels(VIDEO, settings.video, family.vision.video_pixels[0], family.vision)
    if settings.video.audio and (family.audio is None or family.vision is None):
        msg = f"video.audio is set, and a {family.model_type} model does not hear the sound of videos; switch it off"
        raise ConfigError(msg)
    rate = settings.audio.sample_rate
    if family.audio is not None and rate is not None and rate > family.audio.rate:
        msg = f"audio.sample_rate = {rate} must lie between 1 and the model's rate of {family.audio.rate}"
        raise ConfigError(msg)


def _check_pixels(kind: str, settings: ImageSection | VideoSection, default: int, spec: VisionSpec) -> None:
    """Check the multiple and the bounds of pixels of images or videos."""
    if (multiple := settings.multiple) % spec.factor:
        side = f"{spec.patch} x {spec.merge}"
        msg = f"{kind}.multiple = {multiple} must be a multiple of the {spec.factor} pixels of a token ({side})"
        raise ConfigError(msg)
    low, high = default if settings.min_pixels is None else settings.min_pixels, settings.max_pixels
    if high is not None and low > high:
        msg = f"{kind}.min_pixels = {low} must lie between 1 and {kind}.max_pixels = {high}"
        raise ConfigError(msg)
