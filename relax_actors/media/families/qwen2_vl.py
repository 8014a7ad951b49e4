"""Qwen2-VL: images and videos, the patches of a video numbered whatever its rate."""

from relax_actors.media.families.spec import (
    DecoderSpec,
    FamilySpec,
    PositionRule,
    Processors,
    SglangSpec,
    VisionSpec,
)

QWEN2_VL = FamilySpec(
    model_type="qwen2_vl",
    tokens={
        "vision_start": "<|vision_start|>",
        "vision_end": "<|vision_end|>",
        "image": "<|image_pad|>",
        "video": "<|video_pad|>",
    },
    vision=VisionSpec(
        patch=14,
        merge=2,
        temporal=2,
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
        image_pixels=(56 * 56, 28 * 28 * 1280),
        video_pixels=(128 * 28 * 28, 768 * 28 * 28),
        whole_video=False,
    ),
    positions=PositionRule("consecutive"),
    processors=Processors("Qwen2VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    vision_width="hidden_size",
    decoder=DecoderSpec("qwen2", ignores_head_dim=True),
    stored_prefixes=(("model.language_model.", "model."), ("model.visual.", "visual.")),
    sglang=SglangSpec(
        "Qwen2VLForConditionalGeneration",
        (("model.visual.", "visual."), ("model.language_model.", "model.")),
        {"in_chans": 3},
    ),
)
