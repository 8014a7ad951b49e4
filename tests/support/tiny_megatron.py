"""Tiny models and batches for the tests of the Megatron engine; whoever imports it is skipped where it is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.config import Config, validate
from relax_actors.data.model_folder import prepare
from relax_actors.engines.megatron import installation
from relax_actors.engines.protocols import Sequences, TrainBatch
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
        installation.require()
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


def batch_of(seed: int, samples: int = 12) -> TrainBatch:
    """Sequences of various lengths, with log-probs near those of a uniform policy."""
    random = np.random.default_rng(seed)

    def tokens(most: int) -> Any:
        return random.integers(0, len(ALPHABET), random.integers(1, most + 1)).astype(np.int32)

    sequences = Sequences([tokens(6) for _ in range(samples)], [tokens(12) for _ in range(samples)])
    old = [
        (-np.log(len(ALPHABET)) + 0.1 * random.standard_normal(len(c))).astype(np.float32)
        for c in sequences.completions
    ]
    advantages = random.standard_normal(samples).astype(np.float32)
    return TrainBatch(sequences, old, advantages, samples=[4] * (samples // 4))


def routed(batch: TrainBatch, seed: int, missing: float = 0.2) -> TrainBatch:
    """A batch with experts of `MOE` drawn at random for its tokens, in no order, and none for a share of them."""
    random = np.random.default_rng(seed)
    layers, experts, top_k = MOE["num_hidden_layers"], MOE["num_experts"], MOE["num_experts_per_tok"]

    def drawn(tokens: int) -> Any:
        every = np.broadcast_to(np.arange(experts, dtype=np.int16), (tokens, layers, experts))
        chosen = random.permuted(every, axis=-1)[..., :top_k]
        return np.where(random.random((tokens, 1, 1)) < missing, np.int16(-1), chosen)

    sequences = batch.sequences
    recorded = [drawn(length - 1) for length in sequences.lengths]
    return replace(batch, sequences=replace(sequences, experts=recorded))
