"""Compare the CPU time of a step in Megatron-Core and in the torch engine on the same model and batches, interleaved.

    python benchmarks/megatron_step.py [--steps 15] [--json]

One thread, one rank, float32; forward and backward of packed micro-batches, clipping and AdamW.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from training_workload import DENSE, MOE, VOCABULARY, config_of, start_engine, timed_step

from relax_actors.engines.protocols import TrainSample

SAMPLES, PROMPT = 64, 32
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "dense, completions of 96": (DENSE, 0.0),
    "dense, log-normal": (DENSE, 0.8),
    "16 experts, completions of 96": (MOE, 0.0),
    "16 experts, log-normal": (MOE, 0.8),
}


def batch_of(seed: int, sigma: float) -> list[TrainSample]:
    """Random sequences with completions of 96 tokens in the median."""
    random = np.random.default_rng(seed)
    lengths = np.clip((96 * random.lognormal(0, sigma, SAMPLES)).round(), 2, 400).astype(np.int64)
    completions = [random.integers(0, VOCABULARY, n, dtype=np.int32) for n in lengths]
    prompts = [random.integers(0, VOCABULARY, PROMPT, dtype=np.int32) for _ in lengths]
    advantages = random.standard_normal(SAMPLES).astype(np.float32)
    return [
        TrainSample.of_completion(
            prompt,
            completion,
            logprobs=np.full(len(completion), -np.log(VOCABULARY), np.float32),
            advantages=np.full(len(completion), advantage, np.float32),
        )
        for prompt, completion, advantage in zip(prompts, completions, advantages, strict=True)
    ]


def measure(folder: Path, model: dict[str, Any], sigma: float, steps: int) -> dict[str, float]:
    """Median CPU seconds of a step of both engines, without the first step; the losses must agree."""
    names = ("torch", "megatron")
    engines = [start_engine(config_of(folder / name, model, backend=name)) for name in names]
    times = np.zeros((steps, 2))
    for step in range(steps):
        batch, losses = batch_of(step, sigma), [0.0, 0.0]
        for which in (step % 2, 1 - step % 2):
            times[step, which], found = timed_step(engines[which], batch, step)
            losses[which] = found["loss"]
        if abs(losses[0] - losses[1]) > 1e-3:
            message = f"step {step}: losses {losses} differ"
            raise SystemExit(message)
    medians = np.median(times[1:], 0)
    ratio = float(np.median(times[1:, 1] / times[1:, 0]))
    return {name: round(float(seconds), 4) for name, seconds in zip(names, medians, strict=True)} | {
        "ratio": round(ratio, 3)
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (model, sigma)) in enumerate(CASES.items()):
            figures[name] = measure(Path(folder) / str(number), model, sigma, options.steps)
    table = Table("CPU seconds of a step", "torch", "megatron", "ratio")
    for name, found in figures.items():
        table.add_row(name, *(str(value) for value in found.values()))
    Console(stderr=options.json).print(table)
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
