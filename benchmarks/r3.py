"""Compare steps with and without router replay (R3): CPU time, and distance of the trainer from the rollout.

    python benchmarks/r3.py [--backend torch|megatron|both] [--steps 25] [--json]

A small Qwen3-MoE with random weights. The rollout generates in bfloat16 and records the experts; a trainer in float32
steps on each batch with and without them. One of 25 pairs contains the pass without replay that a run makes every 50
steps, so this pass is counted twice here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from training_workload import MOE, VOCABULARY, config_of, start_engine, timed_step

from relax_actors.engines.protocols import GenerationRequest, TrainSample
from relax_actors.engines.transformers.engine import TransformersEngine

ROWS, SAMPLES, PROMPT, LONGEST, BUDGET = 8, 4, 32, 64, 1024
STOPS = frozenset(range(8))
"""Also the padding token, whose embedding transformers does not train."""


def generated_batch(rollout: TransformersEngine, seed: int) -> list[TrainSample]:
    """Generate the samples of a step, with the experts that the rollout chose."""
    random = np.random.default_rng(seed)
    requests = [
        GenerationRequest(
            tokens=random.integers(len(STOPS), VOCABULARY, PROMPT, dtype=np.int32),
            seed=seed * ROWS + row,
            samples=SAMPLES,
            temperature=1.0,
            top_p=1.0,
            max_tokens=LONGEST,
            stop_ids=STOPS,
        )
        for row in range(ROWS)
    ]
    generated = rollout.generate(requests, lambda: None)
    pairs = [(request, sample) for request, group in zip(requests, generated, strict=True) for sample in group]
    advantages = random.standard_normal(len(pairs)).astype(np.float32)
    return [
        TrainSample.of_completion(
            request.tokens,
            sample.tokens,
            logprobs=sample.logprobs,
            advantages=np.full(len(sample.tokens), advantage, np.float32),
            routed_experts=sample.routed_experts,
            row=i // SAMPLES,
        )
        for i, ((request, sample), advantage) in enumerate(zip(pairs, advantages, strict=True))
    ]


def measure(folder: Path, backend: str, steps: int) -> dict[str, float]:
    """Step on the same batches with and without their experts, interleaved; the weights hardly change."""
    settings = {"backend": backend, "router_replay": True, "max_tokens_per_microbatch": BUDGET, "learning_rate": 1e-9}
    config = config_of(folder / backend, MOE, **settings)
    engine = start_engine(config)
    rollout = TransformersEngine(config.model_path, dtype=torch.bfloat16, records_experts=True)
    published = folder / f"{backend}.safetensors"
    rollout.load(0, engine.publish(published), [published])
    times, deltas = np.zeros((steps, 2)), np.zeros((steps, 2, 2))
    rerouted, compared = [], {}
    for step in range(steps):
        batch = generated_batch(rollout, step)
        without = [replace(sample, routed_experts=None) for sample in batch]
        for which in (step % 2, 1 - step % 2):
            times[step, which], found = timed_step(engine, batch if which else without, step)
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
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    backends = ("torch", "megatron") if options.backend == "both" else (options.backend,)
    with tempfile.TemporaryDirectory() as folder:
        figures = {backend: measure(Path(folder), backend, options.steps) for backend in backends}
    table = Table("", *figures, title="With and without router replay")
    for name in next(iter(figures.values())):
        table.add_row(name, *(str(found[name]) for found in figures.values()))
    Console(stderr=options.json).print(table)
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
