"""Qwen2.5-Omni: a video and its sound alternate in chunks of seconds."""

from dataclasses import replace
from typing import Any

import numpy as np

from relax_actors.media.families.qwen2_audio import QWEN2_AUDIO
from relax_actors.media.families.qwen2_vl import QWEN2_VL
from relax_actors.media.families.spec import AudioSpec, DecoderSpec, FamilySpec, PositionRule, SglangSpec


def times(numbers: np.ndarray, seconds: np.float32, scale: np.float32) -> np.ndarray:
    """Return the positions of temporal patches, multiplied in this order for its rounding."""
    return numbers * seconds * scale


def scale(body: dict[str, Any]) -> float:
    """Return the positions a second of video."""
    return float(body.get("position_id_per_seconds", 25))


def _chunks(times: np.ndarray, step: int) -> np.ndarray:
    """Return the chunk of each token; a token opens at most one chunk, however late it is."""
    chunks, chunk = np.zeros(len(times), np.int64), 0
    for index, time in enumerate(times):
        chunk += bool(time >= (chunk + 1) * step)
        chunks[index] = chunk
    return chunks


QWEN2_5_OMNI = FamilySpec(
    model_type="qwen2_5_omni_thinker",
    whole="qwen2_5_omni",
    voice=("talker.", "token2wav."),
    tokens={
        **QWEN2_AUDIO.tokens,
        "image": "<|IMAGE|>",
        "video": "<|VIDEO|>",
        "vision_start": "<|vision_bos|>",
        "vision_end": "<|vision_eos|>",
    },
    placeholder_field=QWEN2_AUDIO.placeholder_field,
    vision=QWEN2_VL.vision,
    audio=AudioSpec(mels=128, padded_seconds=30.0),
    # The two tokens at either end of a video with its sound have one position.
    positions=PositionRule("consecutive", times, scale, after_side=False, rounds=_chunks, start_step=0),
    processors=replace(QWEN2_VL.processors, whole="Qwen2_5OmniProcessor", reads_video_size=False),
    decoder=DecoderSpec("qwen2", "model."),
    sglang=SglangSpec(
        "Qwen2_5OmniForConditionalGeneration",
        (
            ("model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
            ("visual.", "towers.visual."),
            ("audio_tower.", "towers.audio_tower."),
        ),
    ),
)
