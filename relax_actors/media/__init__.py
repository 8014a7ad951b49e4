"""Preprocessing of images, video and sound for the supported multimodal models.

A pure library: it knows neither the broker nor the configuration. Importing it loads neither torch nor a decoder;
`process` loads what a medium needs. One medium goes through `process` (decode, sample, resize, extract features) once;
`expand` then replaces the placeholders of a prompt and computes its rotary positions; engines call `pixel_values`.
"""

from relax_actors.media.expand import Expanded, expand
from relax_actors.media.family import AudioSpec, Family, VisionSpec, family_of, family_of_body
from relax_actors.media.features import VERSION, Features
from relax_actors.media.load import load_frames, load_image, load_sound
from relax_actors.media.normalise import pixel_values
from relax_actors.media.process import check_settings, process
from relax_actors.media.settings import AudioSettings, ImageSettings, Limits, MediaSettings, VideoSettings

__all__ = [
    "VERSION",
    "AudioSettings",
    "AudioSpec",
    "Expanded",
    "Family",
    "Features",
    "ImageSettings",
    "Limits",
    "MediaSettings",
    "VideoSettings",
    "VisionSpec",
    "check_settings",
    "expand",
    "family_of",
    "family_of_body",
    "load_frames",
    "load_image",
    "load_sound",
    "pixel_values",
    "process",
]
