"""Router replay (R3) against none: CPU time of a step, paired, and how far the trainer is from the rollout.

    python benchmarks/r3.py [--backend torch|megatron|both] [--steps 20] [--json]

One small Qwen3-MoE of random weights. The rollout generates in bfloat16 and records the experts; two trainers in
float32 step on the same batches in turns, one with replay and one without. Twenty steps hold one of the comparisons
that the one with replay makes every twenty steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from relax_actors.config import Config, validate
from relax_actors.engines.inference import GenerationRequest
from relax_actors.engines.inference.transformers_engine import TransformersEngine
from relax_actors.engines.training import Sequences, TrainBatch, TrainingEngine, train
from relax_actors.engines.training.torch_engine import TorchEngine
from relax_actors.modelfolder import prepare

VOCABULARY, ROWS, SAMPLES, PROMPT, LONGEST = 512, 8, 8, 32, 64
MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def config_of(folder: Path, backend: str, *, replays: bool) -> Config:
    """A run with the model; its folder is made."""
    tree: dict[str, Any] = {
        "run": {"name": "r3", "folder": str(folder)},
        "model": {"architecture": MODEL, "tokenizer": {"alphabet": "01#"}},
        "data": {"kind": "python", "function": "nothing"},
        "trainer": {"backend": backend, "router_replay": replays, "learning_rate": 1e-5, "token_budget": 4096},
    }
    config = validate(tree, "benchmark")
    prepare(config, config.model_path)
    return config


def begun(config: Config) -> TrainingEngine:
    """The engine of a configuration, at version 0."""
    engine: TrainingEngine
    if config.trainer.backend == "torch":
        engine = TorchEngine(config)
    else:
        from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: PLC0415 only where it is asked for

        engine = MegatronEngine(config)
    engine.initialise(1)
    engine.finish_warm_start()
    return engine


def rolled_out(rollout: TransformersEngine, seed: int) -> TrainBatch:
    """A step's samples with the experts that they were generated with."""
    random = np.random.default_rng(seed)
    requests = [
        GenerationRequest(
            tokens=random.integers(0, VOCABULARY, PROMPT, dtype=np.int32),
            seed=seed * ROWS + row,
            samples=SAMPLES,
            temperature=1.0,
            top_p=1.0,
            max_tokens=LONGEST,
            stop_ids=frozenset(range(8)),
        )
        for row in range(ROWS)
    ]
    generated = rollout.generate(requests, lambda: None)
    pairs = [(request, sample) for request, group in zip(requests, generated, strict=True) for sample in group]
    experts = [sample.routed_experts for _, sample in pairs if sample.routed_experts is not None]
    sequences = Sequences([request.tokens for request, _ in pairs], [sample.tokens for _, sample in pairs], experts)
    advantages = random.standard_normal(len(pairs)).astype(np.float32)
    return TrainBatch(sequences, [sample.logprobs for _, sample in pairs], advantages, samples=[SAMPLES] * ROWS)


def stepped(engine: TrainingEngine, batch: TrainBatch, step: int) -> tuple[float, dict[str, float]]:
    """CPU seconds of a step, and its figures."""
    began = time.process_time()
    metrics = dict(train(engine, batch, step, lambda: None).metrics)
    return time.process_time() - began, metrics


def measure(folder: Path, backend: str, steps: int) -> dict[str, float]:
    """Both trainers on the same batches, in turns: a step of one, the same step of the other."""
    engines = [begun(config_of(folder / backend, backend, replays=replays)) for replays in (False, True)]
    rollout = TransformersEngine(folder / backend / "model-config", dtype=torch.bfloat16, records_experts=True)
    times, deltas = np.zeros((steps, 2)), np.zeros((steps, 2, 2))
    rerouted, compared = [], {}
    for step in range(steps):
        announced = folder / f"{backend}.{step}.safetensors"
        rollout.load(step, engines[1].announce(announced), [announced])
        announced.unlink()
        batch = rolled_out(rollout, step)
        without = replace(batch, sequences=replace(batch.sequences, experts=None))
        for which in (step % 2, 1 - step % 2):
            times[step, which], found = stepped(engines[which], batch if which else without, step)
            deltas[step, which] = found["abs_delta"], found["k3"]
            if which:
                rerouted.append(found["rerouted"])
                compared |= {name: value for name, value in found.items() if name.startswith("unreplayed_")}
    total = times.sum(0)
    mean = deltas.mean(0)
    return {
        "cpu_seconds_without": round(total[0] / steps, 4),
        "cpu_seconds_with": round(total[1] / steps, 4),
        "ratio": round(total[1] / total[0], 4),
        "ratio_median_of_pairs": round(float(np.median(times[1:, 1] / times[1:, 0])), 4),
        "rerouted": round(float(np.mean(rerouted)), 5),
        "rerouted_without": round(compared["unreplayed_rerouted"], 5),
        "abs_delta_without": round(mean[0, 0], 6),
        "abs_delta_with": round(mean[1, 0], 6),
        "k3_without": round(mean[0, 1], 8),
        "k3_with": round(mean[1, 1], 8),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--backend", choices=("torch", "megatron", "both"), default="both")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    backends = ("torch", "megatron") if options.backend == "both" else (options.backend,)
    with tempfile.TemporaryDirectory() as folder:
        figures = {backend: measure(Path(folder), backend, options.steps) for backend in backends}
    table = Table("", *figures, title="Router replay against none")
    for name in next(iter(figures.values())):
        table.add_row(name, *(str(found[name]) for found in figures.values()))
    Console(stderr=options.json).print(table)
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
