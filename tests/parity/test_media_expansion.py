"""Expanded prompts and rotary positions against the processors and models of transformers.

Its video processors need torchvision: `make sglang` installs it beside a torch without CUDA.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import av
import numpy as np
import pytest
import torch
import transformers
from transformers.video_utils import VideoMetadata

from relax_actors.config.media import AudioSection, ImageSection, LimitsSection, MediaSection, VideoSection
from relax_actors.media import Family, Features, expand, process
from relax_actors.media.decode_audio import decode_audio
from relax_actors.media.normalise import pixel_values
from relax_actors.media.sizes import sampled
from relax_actors.media.source import Source
from tests.support.media_files import frames_of, image_file, picture, tone, video_file, wav_file
from tests.support.media_models import OMNI, VISION, encode, family, model_of, processor, tokenizer

pytest.importorskip("torchvision", reason="the video processors of transformers need torchvision: make sglang")
IMAGE_PIXELS, VIDEO_PIXELS, FRAMES = (16 * 16, 64 * 64), (16 * 16, 64 * 64 * 8), (2, 16)
IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
SOUND = "<|audio_start|><|audio_pad|><|audio_end|>"
FPS = 2.0


def settings(*, audio: bool = False, whole: bool = False) -> MediaSection:
    low, high = VIDEO_PIXELS
    most = {"total_pixels": high} if whole else {"max_pixels": high}
    video = VideoSection(fps=FPS, min_frames=FRAMES[0], max_frames=FRAMES[1], min_pixels=low, audio=audio, **most)
    return MediaSection(image=ImageSection(min_pixels=IMAGE_PIXELS[0], max_pixels=IMAGE_PIXELS[1]), video=video)


@dataclass
class Case:
    """A prompt, with its media as this project and as transformers take them."""

    text: str
    images: list[tuple[int, int]] = field(default_factory=list)
    videos: list[tuple[int, int]] = field(default_factory=list)  # frames, frames a second
    sounds: list[float] = field(default_factory=list)
    inside: bool = False


CASES = {
    "text": Case("what?"),
    "image": Case(f"a{IMAGE}b", images=[(40, 56)]),
    "images": Case(f"{IMAGE}and{IMAGE}?", images=[(40, 56), (90, 33)]),
    "video": Case(f"see {VIDEO}?", videos=[(23, 10)]),
    "odd video": Case(f"see {VIDEO}?", videos=[(7, 3)]),
    "videos": Case(f"{VIDEO}{VIDEO}.", videos=[(31, 10), (12, 4)]),
    "mixed": Case(f"{IMAGE}x{VIDEO}y{IMAGE}", images=[(40, 56), (64, 64)], videos=[(31, 10)]),
    "sound": Case(f"hear {SOUND}?", sounds=[1.234]),
    "sounds": Case(f"{SOUND}, {SOUND}", sounds=[0.3, 2.0]),
    "all": Case(f"{SOUND}{IMAGE} {VIDEO}?", images=[(40, 56)], videos=[(31, 10)], sounds=[1.0]),
    "sound in video": Case(f"see {VIDEO}?", videos=[(50, 10)], inside=True),
    "image and sound in video": Case(f"{IMAGE}see {VIDEO}?", images=[(40, 56)], videos=[(35, 10)], inside=True),
}
"""Prompts of every mixture."""


def raw_media(case: Case) -> list[tuple[str, bytes]]:
    """Return the kinds and files of the media of a case, in the order of its placeholders."""
    images, videos, sounds = iter(case.images), iter(case.videos), iter(case.sounds)
    found = []
    for part in case.text.replace(IMAGE, "\0i").replace(VIDEO, "\0v").replace(SOUND, "\0a").split("\0")[1:]:
        if part[0] == "i":
            found.append(("image", image_file(picture(*next(images)))))
        elif part[0] == "v":
            count, fps = next(videos)
            sound = tone(count / fps) if case.inside else None
            found.append(("video", video_file(frames_of(count), fps, sound=sound)))
        else:
            found.append(("audio", wav_file(tone(next(sounds)))))
    return found


tiny_model = cache(model_of)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # a tensor in transformers' numpy
@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        (model_type, name)
        for model_type in (*VISION, *OMNI)
        for name, case in CASES.items()
        if model_type in OMNI or not (case.sounds or case.inside)
    ],
)
def test_expanded_prompt_equals_that_of_the_processor(model_type: str, name: str) -> None:
    case, of = CASES[name], family(model_type)
    raw = raw_media(case)
    assert of.vision is not None
    chosen = settings(audio=case.inside, whole=of.vision.whole_video)
    features = [medium for kind, data in raw for medium in process(data, kind, of, chosen)]
    expanded = expand(encode(case.text), features, of, tokenizer().backend_tokenizer)
    batch = processor(of, image=IMAGE_PIXELS, video=VIDEO_PIXELS, frames=FRAMES)(
        text=[case.text], return_tensors="pt", **arguments_of(case, of, raw, features)
    )
    assert expanded.tokens.tolist() == batch["input_ids"][0].tolist()
    for kind, name_of in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        own = [pixel_values(torch.from_numpy(medium.array), of.vision) for medium in features if medium.kind == kind]
        assert not own or np.array_equal(np.concatenate(own), batch[name_of].numpy())
    heard = [medium for medium in features if medium.kind == "audio"]
    if len(heard) == 1:  # several are padded to the longest, which changes their last frames
        valid = batch["feature_attention_mask"][0].bool()
        assert np.array_equal(heard[0].array, batch["input_features"][0][:, valid].numpy())
    positions, delta = positions_of(tiny_model(model_type), expanded.tokens, features, case)
    assert np.array_equal(expanded.positions, positions)
    assert expanded.positions.dtype == of.position_dtype
    assert expanded.delta == delta
    for medium, start, count in zip(features, expanded.starts, expanded.counts, strict=True):
        assert expanded.tokens[start] == of.ids[medium.kind]
        assert (expanded.tokens[start:] == of.ids[medium.kind]).sum() >= count


def positions_of(model: Any, ids: np.ndarray, features: list[Features], case: Case) -> tuple[np.ndarray, float]:
    """Return the rotary positions and their delta by the model itself."""
    base = model if hasattr(model, "get_rope_index") else model.model
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    grids: dict[str, Any] = {
        f"{kind}_grid_thw": torch.tensor(np.array([m.grid for m in features if m.kind == kind]))
        for kind in ("image", "video")
        if any(m.kind == kind for m in features)
    }
    seconds = torch.tensor([m.seconds_per_grid for m in features if m.kind == "video"])
    arguments: dict[str, Any] = {"attention_mask": torch.ones_like(tokens), **grids}
    if "omni" in model.config.model_type:
        arguments |= {"second_per_grids": seconds, "use_audio_in_video": case.inside}
        arguments["audio_seqlens"] = torch.tensor([int(m.grid[0]) for m in features if m.kind == "audio"])
    else:
        config = model.config
        kinds = (tokens == config.image_token_id).int() + 2 * (tokens == config.video_token_id).int()
        arguments |= {"mm_token_type_ids": kinds, "second_per_grid_ts": seconds if len(seconds) else None}
    positions, delta = base.get_rope_index(tokens, **arguments)
    return positions[:, 0].numpy(), float(delta[0])


def arguments_of(case: Case, of: Family, raw: list[tuple[str, bytes]], features: list[Features]) -> dict[str, Any]:
    """Return the media as the processor takes them: decoded, with all frames where it samples them itself."""
    found: dict[str, Any] = {}
    if case.images:
        found["images"] = [picture(*size) for size in case.images]
    videos = [all_frames(data) for kind, data in raw if kind == "video"]
    sounds = [samples_of(data) for kind, data in raw if kind == "audio" or (kind == "video" and case.inside)]
    if sounds:
        found["audio"] = sounds
    size = {"shortest_edge": VIDEO_PIXELS[0], "longest_edge": VIDEO_PIXELS[1]}
    if videos and of.audio is None:
        rates = [rate for _, rate in case.videos]
        metadata = [VideoMetadata(len(v), rate, duration=len(v) / rate) for v, rate in zip(videos, rates, strict=True)]
        found |= {"videos": videos, "video_metadata": metadata, "do_sample_frames": True, "fps": FPS}
    elif videos:
        # The omni processors take the rate of the sampled frames for all videos of a call, and sample by the same rule.
        assert of.vision is not None
        rates = [float(rate) for _, rate in case.videos]
        indices = [sampled(len(v), rate, of.vision, settings().video) for v, rate in zip(videos, rates, strict=True)]
        clips = [video[index] for video, index in zip(videos, indices, strict=True)]
        grid = next(medium.seconds_per_grid for medium in features if medium.kind == "video")
        options = {"do_sample_frames": False, "fps": 2 / grid, "use_audio_in_video": case.inside, "size": size}
        found |= {"videos": clips, "videos_kwargs": options}
    return found


def all_frames(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def samples_of(data: bytes) -> np.ndarray:
    decoded = decode_audio(Source(data, "sound", LimitsSection()), AudioSection(), (0.0, None))
    assert decoded is not None
    assert decoded[1] == 16_000
    return decoded[0]


def test_sound_of_qwen2_audio_equals_that_of_its_processor() -> None:
    of, samples = family("qwen2_audio"), tone(1.23)
    (own,) = process(wav_file(samples), "audio", of, MediaSection())
    extractor = transformers.WhisperFeatureExtractor(feature_size=64)
    whole = transformers.Qwen2AudioProcessor(extractor, tokenizer(), chat_template="")
    batch = whole(text=[f"a{SOUND}b"], audio=[samples_of(wav_file(samples))], return_tensors="np", sampling_rate=16_000)
    expanded = expand(encode(f"a{SOUND}b"), [own], of, tokenizer().backend_tokenizer)
    assert expanded.tokens.tolist() == batch["input_ids"][0].tolist()
    assert np.array_equal(own.array, batch["input_features"][0])
    assert own.grid[0] == batch["feature_attention_mask"].sum()
