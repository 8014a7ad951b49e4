"""Compare a step with all activations kept and with layers recomputed (`trainer.recompute`): peak memory and seconds.

    python benchmarks/recompute.py [--tokens 4096] [--layers 24] [--hidden 256] [--backend torch]

Each way in a process of its own: a first step of 64 tokens, then one of a single micro-batch. Memory is the peak of the
process above that of the first step.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from training_workload import DENSE, VOCABULARY, config_of, start_engine

from relax_actors.engines.protocols import TrainSample, train

WAYS = ("none", "full")
LENGTH = 512


def sequences(tokens: int, length: int = LENGTH) -> list[TrainSample]:
    """Draw sequences of `length` tokens or fewer, `tokens` in all."""
    random, samples = np.random.default_rng(0), []
    for begin in range(0, tokens, length):
        ids = random.integers(0, VOCABULARY, min(length, tokens - begin), dtype=np.int32)
        sample = TrainSample.of_completion(ids[:8], ids[8:])
        old, advantages = np.full(len(ids), -6.0, np.float32), np.full(len(ids), random.normal(), np.float32)
        samples.append(replace(sample, logprobs=old, advantages=advantages, row=begin))
    return samples


def peak() -> float:
    """Return the largest memory of this process so far in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(way: str, chosen: argparse.Namespace) -> dict[str, float | str]:
    """Measure one way in this process."""
    shape = {"hidden_size": chosen.hidden, "intermediate_size": 3 * chosen.hidden, "num_hidden_layers": chosen.layers}
    settings = {"backend": chosen.backend, "recompute": way, "max_tokens_per_microbatch": chosen.tokens}
    with tempfile.TemporaryDirectory() as folder:
        engine = start_engine(config_of(Path(folder), DENSE | shape, **settings))
    train(engine, sequences(64), 0, lambda: None)
    before, began = peak(), time.perf_counter()
    train(engine, sequences(chosen.tokens), 1, lambda: None)
    return {
        "mib": peak() - before,
        "seconds": time.perf_counter() - began,
        "fingerprint": engine.fingerprint(),
    }


def main() -> None:
    """Run both ways and print what they need."""
    parser = argparse.ArgumentParser(description="memory of recomputed activations")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--backend", default="torch", choices=("torch", "megatron"))
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.way is not None:
        sys.stdout.write(json.dumps(measure(chosen.way, chosen)))
        return
    for way in WAYS:
        command = [sys.executable, *sys.argv, "--way", way]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        sys.stdout.write(
            f"{way:>5}: {found['mib']:7.0f} MiB, {found['seconds']:6.2f} s, weights {found['fingerprint']}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
