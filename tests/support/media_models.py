"""Tiny multimodal models of every family in transformers, with their processors."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from relax_actors.media import Family, family_of

SPECIAL = [
    "<|endoftext|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
]
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;?!<>\n"
ID = {text: number for number, text in enumerate(SPECIAL)}
VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
OMNI = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
HALF = (0.5, 0.5, 0.5)
_WIDTH = 32
_QWEN3 = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": _WIDTH,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
_QWEN25 = {key: _QWEN3[key] for key in list(_QWEN3)[:8]} | {"fullatt_block_indexes": [0], "window_size": 32}
_QWEN2 = {"depth": 1, "embed_dim": 16, "hidden_size": _WIDTH, "num_heads": 2, "patch_size": 8, "mlp_ratio": 2}
_SOUND = {
    "num_mel_bins": 64,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "d_model": 16,
    "output_dim": _WIDTH,
    "n_window": 50,
}


def tokenizer() -> Any:
    """Return a tokenizer of characters with the special tokens, as the processors need it."""
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *CHARACTERS])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokens.decoder = decoders.Fuse()
    named = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "audio_token": "<|audio_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token=SPECIAL[1], pad_token=SPECIAL[0], extra_special_tokens=named
    )
    whole.add_special_tokens({"additional_special_tokens": SPECIAL}, replace_extra_special_tokens=False)
    return whole


def config_of(model_type: str, *, position_id_per_seconds: int | None = None) -> Any:
    """Return the configuration of a tiny model."""
    interleaved = {"mrope_interleaved": True} if "3" in model_type else {}
    section = [4, 2, 2] if "3" in model_type else [2, 3, 3]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, **interleaved}
    text: dict[str, Any] = {
        "vocab_size": len(SPECIAL) + len(CHARACTERS),
        "hidden_size": _WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_parameters": rope,
    }
    if "moe" in model_type:
        text |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    ids: dict[str, Any] = {f"{name}_token_id": ID[f"<|{name}_pad|>"] for name in ("image", "video")}
    ids |= {"vision_start_token_id": ID["<|vision_start|>"], "vision_end_token_id": ID["<|vision_end|>"]}
    if model_type in OMNI:
        ids |= {"audio_token_id": ID["<|audio_pad|>"], "audio_start_token_id": ID["<|audio_start|>"]}
        ids |= {"audio_end_token_id": ID["<|audio_end|>"], "audio_config": _SOUND | {"n_window_infer": 200}}
        ids["position_id_per_seconds"] = position_id_per_seconds or (13 if "3" in model_type else 25)
    vision = _QWEN2 if model_type == "qwen2_vl" else _QWEN3 if "3" in model_type else _QWEN25
    if model_type == "qwen2_5_omni_thinker":
        ids = {
            key.replace("_token_id", "_token_index")
            if key[:5] in ("image", "video") or key == "audio_token_id"
            else key: value
            for key, value in ids.items()
        }
    classes = {
        "qwen2_vl": transformers.Qwen2VLConfig,
        "qwen2_5_vl": transformers.Qwen2_5_VLConfig,
        "qwen3_vl": transformers.Qwen3VLConfig,
        "qwen3_vl_moe": transformers.Qwen3VLMoeConfig,
        "qwen2_5_omni_thinker": transformers.Qwen2_5OmniThinkerConfig,
        "qwen3_omni_moe_thinker": transformers.Qwen3OmniMoeThinkerConfig,
    }
    return classes[model_type](text_config=text, vision_config=vision, **ids)


def model_of(model_type: str, **options: Any) -> Any:
    """Return a tiny model with random weights."""
    classes = {
        "qwen2_vl": transformers.Qwen2VLForConditionalGeneration,
        "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
        "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
        "qwen3_vl_moe": transformers.Qwen3VLMoeForConditionalGeneration,
        "qwen2_5_omni_thinker": transformers.Qwen2_5OmniThinkerForConditionalGeneration,
        "qwen3_omni_moe_thinker": transformers.Qwen3OmniMoeThinkerForConditionalGeneration,
    }
    return classes[model_type](config_of(model_type, **options))


SOUND_ONLY = {
    "model_type": "qwen2_audio",
    "audio_config": {"num_mel_bins": 64},
    "audio_token_index": ID["<|audio_pad|>"],
}
"""What the preprocessing reads of a configuration of Qwen2-Audio."""


def family(model_type: str, **options: Any) -> Family:
    """Return the family of a tiny model."""
    sound_only = model_type == "qwen2_audio"
    with TemporaryDirectory() as folder:
        body = json.dumps(SOUND_ONLY) if sound_only else config_of(model_type, **options).to_json_string()
        (Path(folder) / "config.json").write_text(body)
        found = family_of(Path(folder))
    assert found is not None
    return found


def processor(of: Family, *, image: tuple[int, int], video: tuple[int, int], frames: tuple[int, int]) -> Any:
    """Return the processor of transformers for a family; needs torchvision.

    Args:
        of: the family.
        image: least and most pixels of an image.
        video: least and most pixels of a video.
        frames: least and most sampled frames of a video.
    """
    spec = of.vision
    assert spec is not None
    common = {"patch_size": spec.patch, "merge_size": spec.merge, "temporal_patch_size": spec.temporal}
    common |= {"image_mean": list(spec.mean), "image_std": list(spec.std)}
    images = transformers.Qwen2VLImageProcessor(size=_size(image), **common)
    kind = transformers.Qwen3VLVideoProcessor if spec.whole_video else transformers.Qwen2VLVideoProcessor
    videos = kind(size=_size(video), min_frames=frames[0], max_frames=frames[1], cap_pixels_per_frame=False, **common)
    if of.audio is None:
        classes = {"qwen2_vl": transformers.Qwen2VLProcessor, "qwen2_5_vl": transformers.Qwen2_5_VLProcessor}
        whole = classes.get(of.model_type, transformers.Qwen3VLProcessor)
        return whole(image_processor=images, tokenizer=tokenizer(), video_processor=videos)
    sound = transformers.WhisperFeatureExtractor(feature_size=of.audio.mels, return_attention_mask=True)
    omni = {
        "qwen2_5_omni_thinker": transformers.Qwen2_5OmniProcessor,
        "qwen3_omni_moe_thinker": transformers.Qwen3OmniMoeProcessor,
    }
    return omni[of.model_type](
        image_processor=images, video_processor=videos, feature_extractor=sound, tokenizer=tokenizer()
    )


def _size(pixels: tuple[int, int]) -> dict[str, int]:
    return {"shortest_edge": pixels[0], "longest_edge": pixels[1]}


def encode(text: str) -> np.ndarray:
    """Return the ids of a prompt, int32."""
    return np.array(tokenizer().encode(text), np.int32)


def save(model_type: str, folder: Path) -> Path:
    """Write the configuration and the tokenizer of a tiny model to a folder."""
    config_of(model_type).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
