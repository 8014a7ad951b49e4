"""The files of examples/cluster fit on two nodes of eight GPUs, with models of the full shape and no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.checks import examine
from relax_actors.checks.cluster import placement_lines
from relax_actors.config import load_config
from relax_actors.devices.cluster import simulated_nodes
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
CHAT = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
ROWS: dict[str, list[dict[str, Any]]] = {
    "qwen3_4b_async": [{"prompt": "What is 3 + 4?", "answer": "7"}],
    "qwen3_vl_30b_deepeyes": [{"prompt": "<image>What is to the left?", "answer": "a", "images": ["one.png"]}],
    "qwen3_omni_30b": [{"prompt": "<image>What is it? A) red B) blue", "answer": "A", "images": ["one.png"]}],
}


@pytest.mark.parametrize("name", MODELS)
def test_example_fits_on_two_nodes_of_eight(name: str, tmp_path: Path) -> None:
    tokenizer = {"alphabet": ALPHABET, "chat_template": CHAT}
    folder = models.config_of(tmp_path, MODELS[name], model={"tokenizer": tokenizer}).model_path
    (tmp_path / "one.png").write_bytes(png_of(np.zeros((64, 64, 3), np.uint8)))
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    config = load_config(FOLDER / f"{name}.toml", [f"model.path={folder}", f"data.path={data}"])
    nodes = simulated_nodes("2x8x80GiB")
    findings = examine(config, nodes=nodes)
    assert findings.errors == ()
    assert findings.facts is not None
    lines = list(placement_lines(config, nodes, findings.facts))
    assert all("0 idle GPUs" in line for line in lines[-2:])
    assert sum(line.startswith("trainer_rank") for line in lines) == 4
