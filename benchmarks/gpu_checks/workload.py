"""Models, configurations and batches of the checks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_checks.frame import require
from relax_actors.config import Config, validate
from relax_actors.data.model_folder import prepare
from relax_actors.engines.protocols import TrainingEngine, TrainSample
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.process_setup import configure_torch

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
"""A small dense model."""
EXPERTS: dict[str, Any] = TINY | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
"""A small model with experts."""
MANY_EXPERTS: dict[str, Any] = EXPERTS | {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
}
"""A model whose time is that of its experts."""
QWEN3_0_6B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
"""The shape of Qwen3-0.6B."""
GROUP = 4
FIRST = 16
"""First token of random texts, behind those of the tokenizer: transformers trains no embedding of a padding token."""


def config_of(
    folder: Path, model: dict[str, Any], device: str, *, deterministic: bool = True, **trainer: Any
) -> Config:
    """Return the configuration of a run, and set torch up for it.

    Args:
        folder: of the run; the model folder is made in it.
        model: architecture.
        device: of the trainer.
        deterministic: whether kernels give the same bits in every run.
        trainer: settings of [trainer].

    Raises:
        Skipped: the package of the backend is not installed.
    """
    if trainer.get("backend") == "megatron":
        require("megatron")
    settings: dict[str, Any] = {"learning_rate": 1e-3, "max_tokens_per_microbatch": 4096, "device": device}
    tree: dict[str, Any] = {
        "run": {"name": "check", "folder": str(folder), "deterministic": deterministic},
        "model": {"architecture": model, "tokenizer": {"alphabet": "0123456789>#", "end": "#"}},
        "data": {"kind": "python", "function": "nothing"},
        "trainer": settings | trainer,
    }
    config = validate(tree, "gpu check")
    if not config.model_path.exists():
        prepare(config, config.model_path)
    configure_torch(config.run)
    return config


def start(config: Config, *, initialise: bool = True) -> TrainingEngine:
    """Return the training engine of a configuration, at version 0 unless a checkpoint will be loaded."""
    engine: TrainingEngine
    if config.trainer.backend == "torch":
        engine = TorchEngine(config)
    else:
        from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: PLC0415 optional package

        engine = MegatronEngine(config)
    if initialise:
        engine.initialise(1)
        engine.finish_warm_start()
    return engine


def batch(
    seed: int, *, groups: int = 4, prompt: int = 24, completion: int = 48, vocabulary: int = 512
) -> list[TrainSample]:
    """Return groups of sequences that share a prompt, with completions of different lengths and random advantages."""
    random = np.random.default_rng(seed)
    samples = []
    for row in range(groups):
        shared = random.integers(FIRST, vocabulary, prompt, dtype=np.int32)
        for sample in range(GROUP):
            length = int(random.integers(max(1, completion // 2), completion + 1))
            samples.append(
                TrainSample.of_completion(
                    shared,
                    random.integers(FIRST, vocabulary, length, dtype=np.int32),
                    logprobs=np.full(length, -np.log(vocabulary), np.float32),
                    advantages=np.full(length, random.standard_normal(), np.float32),
                    row=row,
                    sample=sample,
                )
            )
    return samples


def nothing() -> None:
    """Report no progress."""


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return `|found - expected| / |expected|` (Euclidean norms), computed in float64 on the CPU."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    error = float((found - expected).norm() / expected.norm())
    return error if math.isfinite(error) else math.inf
