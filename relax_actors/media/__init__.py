"""Preprocessing of images, video and sound for the supported multimodal models.

A pure library: it does not know the broker. Importing it loads neither torch nor a decoder; `process` loads what a
medium needs. One medium goes through `process` (decode, sample, resize, extract features) once; `expand` then replaces
the placeholders of a prompt and computes its rotary positions; engines normalise its pixels.
"""

from relax_actors.media.expand import Expanded, expand
from relax_actors.media.families import FAMILIES, AudioSpec, VisionSpec
from relax_actors.media.family import Family, family_of
from relax_actors.media.features import VERSION, Features
from relax_actors.media.load import load_frames, load_image, load_sound
from relax_actors.media.process import check_settings, process

__all__ = [
    "FAMILIES",
    "VERSION",
    "AudioSpec",
    "Expanded",
    "Family",
    "Features",
    "VisionSpec",
    "check_settings",
    "expand",
    "family_of",
    "load_frames",
    "load_image",
    "load_sound",
    "process",
]
