"""Compare the cost of preparing media with that of transformers' processors, in CPU milliseconds of one thread.

    python benchmarks/media.py

Both start from the decoded medium, in turns, and the smallest of several rounds counts; a machine under load slows both
alike. What admission adds, decoding and the reader's normalisation, is printed beside it. Needs torchvision
(`make sglang` installs it).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from media_parity import CLIP, HALF, common, size_of

from relax_actors.config.media import ImageSection, VideoSection
from relax_actors.media import AudioSpec, VisionSpec
from relax_actors.media.normalise import pixel_values
from relax_actors.media.sizes import frame_size
from relax_actors.media.sound import features_of_sound
from relax_actors.media.vision import features_of_image, resize, to_patches

Call = Callable[[], Any]


def spec(*, whole: bool = True, pixels: tuple[int, int] = (4096, 1 << 30)) -> VisionSpec:
    """Return the patches of Qwen3-VL, or of Qwen2.5-VL."""
    patch, (mean, std) = (16, HALF) if whole else (14, CLIP)
    return VisionSpec(patch, 2, 2, mean, std, pixels, pixels, whole)


def image_pair(height: int, width: int, of: VisionSpec) -> tuple[Call, Call, Call]:
    """Return three calls: ours, that of transformers, and the reader's normalisation."""
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    processor = transformers.Qwen2VLImageProcessor(size=size_of(of.image_pixels), **common(of))
    features = features_of_image(image, of, ImageSection())
    return (
        lambda: features_of_image(image, of, ImageSection()),
        lambda: processor(images=[image], return_tensors="pt"),
        lambda: pixel_values(torch.from_numpy(features.array), of),
    )


def video_pair(count: int, height: int, width: int, of: VisionSpec) -> tuple[Call, Call, Call]:
    """Return three calls: ours, that of transformers, and the reader's normalisation."""
    video = np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    processor = transformers.Qwen3VLVideoProcessor(
        size=size_of(of.video_pixels), cap_pixels_per_frame=False, **common(of)
    )

    def ours() -> np.ndarray:
        size = frame_size(height, width, count, of, VideoSection())
        return to_patches(np.stack([resize(frame, size) for frame in video]), of, of.temporal)[0]

    patches = ours()
    return (
        ours,
        lambda: processor(videos=[video], do_sample_frames=False, return_tensors="pt"),
        lambda: pixel_values(torch.from_numpy(patches), of),
    )


def sound_pair(seconds: int, *, padded: bool) -> tuple[Call, Call, None]:
    """Return ours and that of transformers."""
    samples = (np.random.default_rng(0).standard_normal(seconds * 16_000) * 0.1).astype(np.float32)
    processor = transformers.WhisperFeatureExtractor(feature_size=128)
    of = AudioSpec(128, padded_seconds=30.0 if padded else 0.0)
    options = {"padding": "max_length" if padded else True, "truncation": padded, "return_attention_mask": True}
    return (
        lambda: features_of_sound(samples, of),
        lambda: processor(samples, sampling_rate=16_000, return_tensors="pt", **options),
        None,
    )


def milliseconds(call: Call) -> float:
    """Return the CPU time of one call."""
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1e3


def main() -> None:
    """Print a line a medium."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    million = spec(pixels=(4096, 1_000_000))
    cases = {
        "image 512 x 512": image_pair(512, 512, spec()),
        "image 500 x 500, resized": image_pair(500, 500, spec()),
        "image 1920 x 1080 to 1 MP": image_pair(1080, 1920, million),
        "clip 16 x 352 x 640": video_pair(16, 352, 640, spec()),
        "clip 16 x 360 x 640, resized": video_pair(16, 360, 640, spec(pixels=(4096, 16 * 360 * 640))),
        "sound 10 s": sound_pair(10, padded=False),
        "sound 10 s, padded to 30 s": sound_pair(10, padded=True),
    }
    print(f"{'CPU ms':30}{'ours':>8}{'theirs':>8}{'ratio':>7}{'normalise':>11}{'with it':>9}")
    for name, (own, theirs, reader) in cases.items():
        best = [
            min(pair) for pair in zip(*[(milliseconds(own), milliseconds(theirs)) for _ in range(rounds)], strict=True)
        ]
        later = min(milliseconds(reader) for _ in range(rounds)) if reader else 0.0
        ratios = f"{best[0] / best[1]:7.2f}{later:11.1f}{(best[0] + later) / best[1]:9.2f}"
        print(f"{name:30}{best[0]:8.1f}{best[1]:8.1f}{ratios}")


if __name__ == "__main__":
    main()
