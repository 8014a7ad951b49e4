"""Models and engines for benchmarks that compare steps of several engines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_actors.config import Config, validate
from relax_actors.data.model_folder import prepare
from relax_actors.engines.protocols import TrainingEngine, TrainSample, train
from relax_actors.engines.torch.engine import TorchEngine

VOCABULARY = 512
DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


def config_of(folder: Path, model: dict[str, Any], **trainer: Any) -> Config:
    """Configuration of a run with a model of random weights; creates the model folder."""
    tree: dict[str, Any] = {
        "run": {"name": "benchmark", "folder": str(folder)},
        "model": {"architecture": model, "tokenizer": {"alphabet": "01#"}},
        "data": {"kind": "python", "function": "nothing"},
        "trainer": {"learning_rate": 1e-5, "max_tokens_per_microbatch": 4096} | trainer,
    }
    config = validate(tree, "benchmark")
    prepare(config, config.model_path)
    return config


def start_engine(config: Config) -> TrainingEngine:
    """Return the training engine of a configuration at version 0."""
    engine: TrainingEngine
    if config.trainer.backend == "torch":
        engine = TorchEngine(config)
    else:
        from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: PLC0415 optional package

        engine = MegatronEngine(config)
    engine.initialise(1)
    engine.finish_warm_start()
    return engine


def timed_step(engine: TrainingEngine, batch: Sequence[TrainSample], step: int) -> tuple[float, dict[str, float]]:
    """Run one step; return its CPU seconds and its metrics."""
    began = time.process_time()
    metrics = dict(train(engine, batch, step, lambda: None).metrics)
    return time.process_time() - began, metrics
