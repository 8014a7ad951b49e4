"""InternVL: an image becomes tiles of one size, and a small copy of the whole; positions are those of text."""

from relax_actors.media.families.spec import (
    TOWERS_FIRST,
    DecoderSpec,
    FamilySpec,
    PositionRule,
    Processors,
    SglangSpec,
    VisionSpec,
)

INTERNVL = FamilySpec(
    model_type="internvl",
    tokens={"vision_start": "<img>", "vision_end": "</img>", "image": "<IMG_CONTEXT>"},
    vision=VisionSpec(
        patch=14,
        merge=2,
        temporal=1,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        image_pixels=(448 * 448, 13 * 448 * 448),
        video_pixels=(448 * 448, 448 * 448),
        whole_video=False,
        tile=448,
        tiles=(1, 12),
    ),
    positions=PositionRule("one axis"),
    processors=Processors("InternVLProcessor", "GotOcr2ImageProcessor", "InternVLVideoProcessor"),
    decoder=DecoderSpec("qwen2", is_open=True),
    sglang=SglangSpec("InternVLForConditionalGeneration", TOWERS_FIRST, decoders=("qwen2", "qwen3")),
    brackets=True,
    absent={"video": "its frames are images of one tile each, with a number before each; give such frames as images"},
    stored_prefixes=(
        ("model.language_model.", "language_model.model."),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("lm_head.", "language_model.lm_head."),
    ),
)
