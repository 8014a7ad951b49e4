"""Qwen3-Omni: each token of a video and its sound has its own time."""

from dataclasses import replace

from relax_actors.media.families.qwen2_5_omni import QWEN2_5_OMNI, scale, times
from relax_actors.media.families.qwen2_vl import QWEN2_VL
from relax_actors.media.families.spec import AudioSpec, DecoderSpec, FamilySpec, PositionRule, SglangSpec, VisionSpec

QWEN3_OMNI = FamilySpec(
    model_type="qwen3_omni_moe_thinker",
    whole="qwen3_omni_moe",
    voice=("talker.", "code2wav."),
    tokens={
        **QWEN2_VL.tokens,
        "audio": "<|audio_pad|>",
        "audio_start": "<|audio_start|>",
        "audio_end": "<|audio_end|>",
    },
    vision=VisionSpec(
        patch=16,
        merge=2,
        temporal=2,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        image_pixels=(3136, 12_845_056),
        video_pixels=(128 * 32 * 32, 768 * 32 * 32),
        whole_video=False,
    ),
    audio=AudioSpec(mels=128, chunk=100),
    positions=PositionRule("interleaved", times, scale, dtype="float32", after_side=False),
    processors=replace(QWEN2_5_OMNI.processors, whole="Qwen3OmniMoeProcessor"),
    decoder=DecoderSpec("qwen3_moe", "model."),
    sglang=SglangSpec("Qwen3OmniMoeForConditionalGeneration", (("", "thinker."),)),
)
