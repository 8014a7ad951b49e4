"""Tiny models and batches for the tests of the Megatron engine; whoever imports it is skipped where it is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_actors.config import Config, validate
from relax_actors.data.model_folder import prepare
from relax_actors.engines.megatron import presence
from relax_actors.errors import ConfigError

ALPHABET = "0123456789>#"
DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
LLAMA = DENSE | {"model_type": "llama", "head_dim": 8, "tie_word_embeddings": False}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def skip_if_missing() -> None:
    """Skip a module's tests where Megatron-Core is not installed."""
    try:
        presence.require()
    except ConfigError as error:
        pytest.skip(str(error), allow_module_level=True)


def config_of(folder: Path, architecture: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """A run with a tiny model of random weights, its folder made."""
    tree: dict[str, Any] = {
        "run": {"name": "megatron", "folder": str(folder), "seed": 5, "steps": 10},
        "model": {"architecture": architecture, "tokenizer": {"alphabet": ALPHABET}},
        "data": {"kind": "python", "function": "nothing"},
        "trainer": {"backend": "megatron", "learning_rate": 1e-2, "max_tokens_per_microbatch": 64},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    config = validate(tree, "test")
    prepare(config, config.model_path)
    return config
