"""Gemma 3: an image of any shape becomes one square, whose tokens attend to each other."""

from relax_actors.media.families.spec import DecoderSpec, FamilySpec, PositionRule, Processors, VisionSpec

GEMMA3 = FamilySpec(
    model_type="gemma3",
    tokens={"vision_start": "<start_of_image>", "vision_end": "<end_of_image>", "image": "<image_soft_token>"},
    placeholder_field="{}_token_index",
    vision=VisionSpec(
        patch=14,
        merge=4,
        temporal=1,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        image_pixels=(896 * 896, 896 * 896),
        video_pixels=(896 * 896, 896 * 896),
        whole_video=False,
        tile=896,
        resampling="bilinear",
    ),
    positions=PositionRule("one axis"),
    processors=Processors("Gemma3Processor", "Gemma3ImageProcessor"),
    decoder=DecoderSpec("gemma3_text", joins_images=True),
    brackets=True,
    marks={"image": "vision_start"},
    around="\n\n",
)
