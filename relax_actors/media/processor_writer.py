"""Writes a model's processor files for users of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relax_actors.config.media import ImageSection, MediaSection, VideoSection
from relax_actors.media.families import VisionSpec
from relax_actors.media.family import Family
from relax_actors.media.processor_files import RESAMPLE, SOUND
from relax_actors.messages.media import VIDEO


def write_processor_files(folder: Path, family: Family, settings: MediaSection) -> None:
    """Write preprocessor_config.json and, for models that see videos, video_preprocessor_config.json.

    With them `transformers.AutoProcessor` prepares prompts as [media] does. It has no words for `total_pixels` of
    models other than Qwen3-VL, `multiple`, and the settings of sounds but their sample rate.
    """
    processors = family.spec.processors
    of_all: dict[str, Any] = {"processor_class": processors.whole}
    if family.audio is not None:
        sound = family.audio
        of_all |= {"feature_extractor_type": SOUND, "return_attention_mask": True}
        of_all |= {"feature_size": sound.mels, "sampling_rate": sound.rate, "hop_length": sound.hop}
        of_all |= {"n_fft": sound.window, "chunk_length": int(sound.padded_seconds) or 30}
    if family.vision is not None:
        vision = family.vision
        image = of_all | {"image_processor_type": processors.image}
        _write(folder / "preprocessor_config.json", image | _image(vision, settings.image))
        if family.spec.decoder.joins_images:
            tokens = (vision.tile // vision.factor) ** 2
            _write(folder / "processor_config.json", of_all | {"image_seq_length": tokens})
        if VIDEO in family.kinds:
            video = {"video_processor_type": processors.video} | _video(vision, settings.video)
            _write(folder / "video_preprocessor_config.json", video)
    else:
        _write(folder / "preprocessor_config.json", of_all)


def _image(spec: VisionSpec, settings: ImageSection) -> dict[str, Any]:
    if spec.tile:
        least, most = spec.tiles
        tiles = {"crop_to_patches": True, "min_patches": least, "max_patches": most} if most > 1 else {}
        channels = {"image_mean": list(spec.mean), "image_std": list(spec.std), "resample": RESAMPLE[spec.resampling]}
        return channels | tiles | {"size": {"height": spec.tile, "width": spec.tile}}
    return _patches(spec) | _size(spec.image_pixels, settings.min_pixels, settings.max_pixels)


def _video(spec: VisionSpec, settings: VideoSection) -> dict[str, Any]:
    most = settings.total_pixels if spec.whole_video else settings.max_pixels
    frames = (settings.min_frames or spec.frames[0], settings.max_frames or spec.frames[1])
    sampling = {"fps": settings.fps or spec.fps, "min_frames": frames[0], "max_frames": frames[1]}
    return _patches(spec) | _size(spec.video_pixels, settings.min_pixels, most) | sampling


def _patches(spec: VisionSpec) -> dict[str, Any]:
    sizes = {"patch_size": spec.patch, "merge_size": spec.merge, "temporal_patch_size": spec.temporal}
    return sizes | {"image_mean": list(spec.mean), "image_std": list(spec.std)}


def _size(default: tuple[int, int], least: int | None, most: int | None) -> dict[str, Any]:
    return {"size": {"shortest_edge": least or default[0], "longest_edge": most or default[1]}}


def _write(path: Path, body: dict[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=1, sort_keys=True))
