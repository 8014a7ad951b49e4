"""The files of examples/cluster with models of their classes: of the full shape without weights, or tiny."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np

from relax_actors.envs.media_bytes import png_of
from tests.support import models

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
ALPHABET = "".join(chr(code) for code in range(32, 127)) + "\n"
MOE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "max_position_embeddings": 65_536,
    "vocab_size": 151_936,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
SOUND = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "output_dim": 2048,
    "n_window": 50,
    "n_window_infer": 800,
    "downsample_hidden_size": 480,
    "max_source_positions": 1500,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_4b_async": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "qwen3_vl_30b_deepeyes": {"model_type": "qwen3_vl_moe", "text_config": MOE, "vision_config": VISION},
    "qwen3_omni_30b": {
        "model_type": "qwen3_omni_moe_thinker",
        "text_config": MOE,
        "vision_config": VISION,
        "audio_config": SOUND,
        "position_id_per_seconds": 13,
    },
}
DENSE_VL = {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65_536,
    "vocab_size": 151_936,
    "rope_parameters": MOE["rope_parameters"],
}
MODELS |= {
    "qwen3_30b_replay": {"model_type": "qwen3_moe"}
    | {name: value for name, value in MOE.items() if name != "rope_parameters"}
    | {"norm_topk_prob": True},
    "qwen3_vl_8b_geometry": {
        "model_type": "qwen3_vl",
        "text_config": DENSE_VL,
        "vision_config": VISION | {"out_hidden_size": 4096},
    },
    "qwen2_audio_7b_spoken": {
        "model_type": "qwen2_audio",
        "text_config": {
            "model_type": "qwen2",
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 8192,
            "vocab_size": 156_032,
        },
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 128,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "d_model": 1280,
            "max_source_positions": 1500,
        },
    },
}
CHAT = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}#{% endfor %}"
)
ROWS: dict[str, list[dict[str, Any]]] = {
    "qwen3_4b_async": [{"prompt": "What is 3 + 4?", "answer": "7"}],
    "qwen3_vl_30b_deepeyes": [{"prompt": "<image>What is to the left?", "answer": "a", "images": ["one.png"]}],
    "qwen3_omni_30b": [{"prompt": "<image>What is it? A) red B) blue", "answer": "A", "images": ["one.png"]}],
    "qwen3_30b_replay": [{"prompt": "What is 3 + 4?", "answer": "7"}],
    "qwen3_vl_8b_geometry": [
        {"prompt": "<image>Find x.\nA. 2\nB. 4", "choices": ["2", "4"], "answer": "B", "images": ["one.png"]}
    ],
    "qwen2_audio_7b_spoken": [{"prompt": "<audio>Answer in a few words.", "answer": "7", "audios": ["one.wav"]}],
}
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 2048,
    "depth": 4,
    "num_heads": 2,
    "out_hidden_size": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "d_model": 32,
    "output_dim": 32,
    "downsample_hidden_size": 32,
    "n_window_infer": 100,
    "mrope_section": [4, 2, 2],
    "deepstack_visual_indexes": [0, 1, 2],
}
"""Sizes of tiny models, in place of those of the same names."""


def _small(tree: dict[str, Any]) -> dict[str, Any]:
    sizes = {name: value for name, value in TINY.items() if name in tree}
    inner = {name: _small(value) for name, value in tree.items() if isinstance(value, dict)}
    return {name: value for name, value in (tree | sizes | inner).items() if name != "vocab_size"}


def write_inputs(folder: Path, name: str, *, tiny: bool = False) -> list[str]:
    """Write model folder and data of a file; return the settings that name them."""
    architecture = MODELS[name]
    if tiny:
        architecture = _small(architecture)
    tokenizer = {"alphabet": ALPHABET, "chat_template": CHAT}
    model = models.config_of(folder, architecture, model={"tokenizer": tokenizer}).model_path
    (folder / "one.png").write_bytes(png_of(np.zeros((64, 64, 3), np.uint8)))
    with wave.open(str(folder / "one.wav"), "wb") as sound:
        sound.setparams((1, 2, 16_000, 0, "NONE", ""))
        sound.writeframes(bytes(32_000))
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name] * (16 if tiny else 1)))
    return [f"model.path={model}", f"data.path={data}"]
