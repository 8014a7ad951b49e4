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
MODELS: dict[str, dict[str, Any]] = {
    path.parent.name: json.loads(path.read_text()) for path in sorted((FOLDER / "shapes").glob("*/config.json"))
}
"""Architectures of the models by the names of the files."""
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
    # The tokenizer of a test has ids of its own.
    architecture = {key: value for key, value in MODELS[name].items() if not key.endswith("_token_id")}
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
