"""Qwen2-Audio: sounds alone, each padded to 30 seconds, with positions as text."""

from relax_actors.media.families.spec import (
    AudioSpec,
    DecoderSpec,
    FamilySpec,
    PositionRule,
    Processors,
    SglangSpec,
)

QWEN2_AUDIO = FamilySpec(
    model_type="qwen2_audio",
    tokens={"audio": "<|AUDIO|>", "audio_start": "<|audio_bos|>", "audio_end": "<|audio_eos|>"},
    placeholder_field="{}_token_index",
    audio=AudioSpec(mels=128, padded_seconds=30.0, fixed=True),
    positions=PositionRule("one axis"),
    processors=Processors("Qwen2AudioProcessor"),
    decoder=DecoderSpec("qwen2", is_open=True),
    stored_prefixes=(
        ("model.language_model.", "language_model.model."),
        ("model.language_model.", "language_model.model.model."),
        ("model.audio_tower.", "audio_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("lm_head.", "language_model.lm_head."),
    ),
    sglang=SglangSpec(
        "Qwen2AudioForConditionalGeneration",
        (
            ("model.language_model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
            ("model.", ""),
        ),
    ),
)
