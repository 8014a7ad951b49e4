"""Qwen3-VL, dense and with experts: the times of a video stand in the prompt as text."""

from dataclasses import replace

from relax_actors.media.families.qwen2_vl import QWEN2_VL
from relax_actors.media.families.spec import (
    DecoderSpec,
    FamilySpec,
    PositionRule,
    Processors,
    SglangSpec,
    VisionSpec,
)

QWEN3_VL = FamilySpec(
    model_type="qwen3_vl",
    tokens=QWEN2_VL.tokens,
    vision=VisionSpec(
        patch=16,
        merge=2,
        temporal=2,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        image_pixels=(65_536, 16_777_216),
        video_pixels=(4096, 25_165_824),
        whole_video=True,
    ),
    positions=PositionRule("interleaved"),
    timestamp="<{seconds:.1f} seconds>",
    processors=Processors("Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor"),
    decoder=DecoderSpec("qwen3"),
    sglang=SglangSpec("Qwen3VLForConditionalGeneration"),
)
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    model_type="qwen3_vl_moe",
    decoder=DecoderSpec("qwen3_moe"),
    sglang=SglangSpec("Qwen3VLMoeForConditionalGeneration"),
)
