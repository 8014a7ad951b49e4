"""Processing of one medium: from raw bytes to features."""

from __future__ import annotations

from pathlib import Path

from relax_actors.errors import ConfigError
from relax_actors.media.family import AudioSpec, Family, VisionSpec
from relax_actors.media.features import Features
from relax_actors.media.settings import ImageSettings, Limits, MediaSettings
from relax_actors.media.sizes import SizeError
from relax_actors.media.source import Source, read_source


def process(
    source: bytes | Path,
    kind: str,
    family: Family,
    settings: MediaSettings,
    limits: Limits,
    *,
    name: str = "",
    start: float = 0.0,
    end: float | None = None,
    deadline: float = float("inf"),
) -> tuple[Features, ...]:
    """Decode one medium and compute its features; a video with its sound gives two.

    Size, duration and number of frames are checked against `limits` before decoding, and memory stays within what
    the sampled frames need. The deadline is checked between frames; one image is bounded by its pixels.

    Args:
        source: path or bytes of the raw medium.
        kind: "image", "video" or "audio".
        family: the model.
        settings: settings of all kinds.
        limits: limits of the raw medium.
        name: origin of bytes, for errors.
        start: seconds at which a video or sound begins.
        end: seconds at which it ends.
        deadline: time of the monotonic clock after which decoding fails.

    Raises:
        RowError: the medium cannot be read or decoded, exceeds a limit, or the model does not take its kind.
        ConfigError: the settings do not fit the model.
    """
    raw = read_source(source, name, limits, deadline)
    if kind not in family.kinds:
        taken = ", ".join(family.kinds)
        raw.refuse(f"a {family.model_type} model takes no {kind}; it takes {taken}")
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
    raw: Source, kind: str, family: Family, settings: MediaSettings, part: tuple[float, float | None]
) -> tuple[Features, ...]:
    # Imported here, because they load decoders and torch.
    if kind == "image" and family.vision is not None:
        from relax_actors.media.vision import image_features  # noqa: PLC0415

        return (image_features(raw, family.vision, settings.image),)
    if kind == "video" and family.vision is not None:
        from relax_actors.media.vision import video_features  # noqa: PLC0415

        video = video_features(raw, family.vision, settings.video, part)
        if not settings.video.audio or family.audio is None:
            return (video,)
        from relax_actors.media.sound import sound_features  # noqa: PLC0415

        sound = sound_features(raw, family.audio, settings.audio, part, inside=True)
        return (video,) if sound is None else (video, sound)
    from relax_actors.media.sound import sound_features  # noqa: PLC0415

    sound = sound_features(raw, _spec(family), settings.audio, part)
    if sound is None:
        raw.refuse("the file has no sound")
    return (sound,)


def _spec(family: Family) -> AudioSpec:
    if family.audio is None:
        msg = f"a {family.model_type} model takes no sound"
        raise ConfigError(msg)
    return family.audio


def check_settings(settings: MediaSettings, family: Family) -> None:
    """Check that settings fit a model.

    Raises:
        ConfigError: they do not.
    """
    if family.vision is not None:
        _check_multiple("image", settings.image, family.vision)
        _check_multiple("video", settings.video, family.vision)
    if settings.video.audio and (family.audio is None or family.vision is None):
        msg = f"video.audio is set, and a {family.model_type} model does not hear the sound of videos; switch it off"
        raise ConfigError(msg)
    rate = settings.audio.sample_rate
    if family.audio is not None and rate is not None and not 0 < rate <= family.audio.rate:
        msg = f"audio.sample_rate = {rate} must lie between 1 and the model's rate of {family.audio.rate}"
        raise ConfigError(msg)


def _check_multiple(kind: str, settings: object, spec: VisionSpec) -> None:
    """Check the multiple and the bounds of pixels of images or videos."""
    multiple = getattr(settings, "multiple", 0)
    if multiple % spec.factor:
        side = f"{spec.patch} x {spec.merge}"
        msg = f"{kind}.multiple = {multiple} must be a multiple of the {spec.factor} pixels of a token ({side})"
        raise ConfigError(msg)
    default = spec.image_pixels if isinstance(settings, ImageSettings) else spec.video_pixels
    low = default[0] if (least := getattr(settings, "min_pixels", None)) is None else least
    high = getattr(settings, "max_pixels", None)
    if high is not None and not 0 < low <= high:
        msg = f"{kind}.min_pixels = {low} must lie between 1 and {kind}.max_pixels = {high}"
        raise ConfigError(msg)
