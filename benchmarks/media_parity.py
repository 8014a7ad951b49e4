"""Compare the features of random media with those of transformers' processors, bit for bit.

    python benchmarks/media_parity.py            # 2,000 media
    python benchmarks/media_parity.py --count 100 --seed 7

Each medium has a random family, size, length and settings. Needs torchvision (`make sglang` installs it).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

from relax_actors.config.media import ImageSection, VideoSection
from relax_actors.media import AudioSpec, VisionSpec
from relax_actors.media.normalise import pixel_values
from relax_actors.media.sizes import SizeError, frame_size, sampled
from relax_actors.media.sound import features_of_sound
from relax_actors.media.vision import features_of_image, resize, to_patches

HALF, CLIP = ((0.5,) * 3, (0.5,) * 3), ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


@dataclass(frozen=True)
class Difference:
    """One medium whose features differ."""

    kind: str
    what: str


def spec_of(random: np.random.Generator) -> VisionSpec:
    """Return the patches of a random family."""
    whole = bool(random.integers(2))
    patch = 16 if whole else 14
    mean, std = HALF if whole else CLIP
    low = int(random.choice([4, 16, 64])) * (2 * patch) ** 2
    pixels = (low, low * int(random.choice([4, 16, 64])))
    return VisionSpec(patch, 2, 2, mean, std, pixels, pixels, whole, frames=(int(random.integers(1, 5)), 16))


def noise(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Return random pixels, smooth or not."""
    pixels = random.integers(0, 256, shape, dtype=np.uint8)
    if random.integers(2):
        pixels = np.sort(pixels, axis=-2)
    return pixels


def side(random: np.random.Generator) -> int:
    """Return a random number of pixels, small ones more often."""
    return int(np.exp(random.uniform(np.log(4), np.log(700))))


def common(spec: VisionSpec) -> dict[str, Any]:
    """Return the settings that all processors of a family have."""
    return {
        "patch_size": spec.patch,
        "merge_size": spec.merge,
        "temporal_patch_size": spec.temporal,
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
    }


def size_of(pixels: tuple[int, int]) -> dict[str, int]:
    """Return least and most pixels as processors take them."""
    return {"shortest_edge": pixels[0], "longest_edge": pixels[1]}


def compare_image(random: np.random.Generator) -> str:
    """Return how an image differs; empty if it does not."""
    spec = spec_of(random)
    image = noise(random, side(random), side(random), 3)
    processor = transformers.Qwen2VLImageProcessor(size=size_of(spec.image_pixels), **common(spec))
    try:
        theirs = processor(images=[image], return_tensors="pt")
    except ValueError:
        theirs = None
    try:
        own = features_of_image(image, spec, ImageSection())
    except SizeError:
        return "" if theirs is None else f"{image.shape} refused"
    if theirs is None:
        return f"{image.shape} taken"
    return differing(
        pixel_values(torch.from_numpy(own.array), spec), own.grid, theirs["pixel_values"], theirs["image_grid_thw"][0]
    )


def compare_video(random: np.random.Generator) -> str:
    """Return how a video differs; empty if it does not."""
    spec = spec_of(random)
    total, rate = int(random.integers(2, 40)), float(random.choice([1, 2, 5, 10, 24, 25, 29.97, 30]))
    video = noise(random, total, max(side(random) // 4, 4), max(side(random) // 4, 4), 3)
    kind = transformers.Qwen3VLVideoProcessor if spec.whole_video else transformers.Qwen2VLVideoProcessor
    processor = kind(
        size=size_of(spec.video_pixels),
        min_frames=spec.frames[0],
        max_frames=spec.frames[1],
        cap_pixels_per_frame=False,
        **common(spec),
    )
    metadata = transformers.video_utils.VideoMetadata(total, rate, duration=total / rate)
    options = {"video_metadata": [metadata], "do_sample_frames": True, "fps": 2.0, "return_tensors": "pt"}
    try:
        theirs = processor(videos=[video], **options)
    except (ValueError, ZeroDivisionError, IndexError):
        return ""  # its sampling fails for few frames; ours takes them
    settings = VideoSection()
    frames = video[sampled(total, rate, spec, settings)]
    try:
        size = frame_size(video.shape[1], video.shape[2], len(frames), spec, settings)
    except SizeError:
        return f"{video.shape} refused"
    patches, grid = to_patches(np.stack([resize(frame, size) for frame in frames]), spec, spec.temporal)
    return differing(
        pixel_values(torch.from_numpy(patches), spec), grid, theirs["pixel_values_videos"], theirs["video_grid_thw"][0]
    )


def compare_sound(random: np.random.Generator) -> str:
    """Return how a sound differs; empty if it does not."""
    mels, padded = int(random.choice([80, 128])), bool(random.integers(2))
    samples = (random.standard_normal(int(random.integers(480, 160_000))) * 0.1).astype(np.float32)
    processor = transformers.WhisperFeatureExtractor(feature_size=mels)
    theirs = processor(
        samples,
        sampling_rate=16_000,
        return_tensors="np",
        return_attention_mask=True,
        padding="max_length" if padded else True,
        truncation=padded,
    )
    array, valid = features_of_sound(samples, AudioSpec(mels, padded_seconds=30.0 if padded else 0.0))
    count = int(theirs["attention_mask"].sum())
    if valid != count:
        return f"{len(samples)} samples: {valid} frames, theirs {count}"
    return "" if np.array_equal(array, theirs["input_features"][0][:, :count]) else f"{len(samples)} samples"


def differing(own: torch.Tensor, grid: np.ndarray, theirs: torch.Tensor, their_grid: torch.Tensor) -> str:
    """Return how pixel values differ; empty if they do not."""
    if grid.tolist() != their_grid.tolist():
        return f"grid {grid.tolist()}, theirs {their_grid.tolist()}"
    return "" if torch.equal(own, theirs) else f"grid {grid.tolist()}: other pixel values"


def compare(count: int, seed: int) -> tuple[Counter[str], list[Difference]]:
    """Compare random media; returns how many of each kind there were, and those that differ."""
    kinds = {"image": compare_image, "video": compare_video, "audio": compare_sound}
    done: Counter[str] = Counter()
    found = []
    for number in range(count):
        kind = list(kinds)[number % len(kinds)]
        what = kinds[kind](np.random.default_rng([seed, number]))
        done[kind] += 1
        if what:
            found.append(Difference(kind, f"medium {number}: {what}"))
    return done, found


def main() -> None:
    """Compare, and end with 1 if a medium differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    start = time.monotonic()
    done, found = compare(chosen.count, chosen.seed)
    for difference in found[:20]:
        print(f"{difference.kind}: {difference.what}")
    counts = ", ".join(f"{number} {kind}" for kind, number in done.items())
    print(f"{counts}: {len(found)} differ ({time.monotonic() - start:.0f} s)")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
