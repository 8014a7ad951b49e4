"""GLM-4.1V: images as Qwen2-VL reads them, before a decoder like GLM-4. Its videos are not supported.

The frames of its videos are placeholders of images between times in whole seconds, which prompts of images have, too.
"""

from relax_actors.media.families.qwen2_vl import QWEN2_VL
from relax_actors.media.families.spec import (
    TOWERS_FIRST,
    DecoderSpec,
    FamilySpec,
    PositionRule,
    Processors,
    SglangSpec,
    VisionSpec,
)

_OF_QWEN = QWEN2_VL.vision
assert _OF_QWEN is not None  # noqa: S101 it sees

GLM4V = FamilySpec(
    model_type="glm4v",
    tokens={"vision_start": "<|begin_of_image|>", "vision_end": "<|end_of_image|>", "image": "<|image|>"},
    vision=VisionSpec(
        patch=14,
        merge=2,
        temporal=2,
        mean=_OF_QWEN.mean,
        std=_OF_QWEN.std,
        image_pixels=(112 * 112, 28 * 28 * 15_000),
        video_pixels=(112 * 112, 28 * 28 * 60_000),
        whole_video=True,
        image_frames=2,
    ),
    positions=PositionRule("consecutive"),
    processors=Processors("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
    decoder=DecoderSpec("glm4"),
    sglang=SglangSpec("Glm4vForConditionalGeneration", TOWERS_FIRST),
    absent={"video": "its frames are placeholders of images, between times that no processor of images writes"},
)
