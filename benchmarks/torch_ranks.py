"""Compare one process of the torch engine with ranks that share the model: memory a rank, and seconds of a step.

    python benchmarks/torch_ranks.py [--ranks 1 2 4] [--layers 24] [--hidden 1024] [--tokens 256]

Each number of ranks trains the same steps. Memory is the largest of all ranks: of the process at its peak, while it
starts and while it steps and publishes, of its modules alone, and of weights, gradients and the optimizer's state by
count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import relax_actors.engines.lean_imports  # noqa: F401 as in ranks, before transformers

# isort: split
from process_memory import reset_peak, resident_mib
from recompute import sequences
from training_workload import DENSE, config_of

from relax_actors.engines.protocols import train
from relax_actors.engines.protocols.footprint import TRAINED_BYTES
from relax_actors.engines.ranks.group import TrainerGroup
from relax_actors.engines.torch.engine import TorchEngine

STEPS, LENGTH = 3, 64
MIB = 1 << 20


def start(ranks: int, folder: Path, shape: dict[str, Any], tokens: int) -> tuple[Any, list[int]]:
    """Start the engine; returns it with its processes."""
    settings = {"torch": {"ranks": ranks}, "max_tokens_per_microbatch": tokens}
    config = config_of(folder, DENSE | shape, **settings)
    if ranks == 1:
        return TorchEngine(config), [os.getpid()]
    group = TrainerGroup(config)
    return group, group.pids


def measure(ranks: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure a number of ranks; with one of them in this process."""
    shape = {"hidden_size": chosen.hidden, "intermediate_size": 3 * chosen.hidden, "num_hidden_layers": chosen.layers}
    modules = resident_mib(os.getpid())
    with tempfile.TemporaryDirectory() as folder:
        engine, processes = start(ranks, Path(folder), shape, chosen.tokens)
        engine.initialise(1)
        engine.finish_warm_start()
        starting = max(resident_mib(pid, peak=True) for pid in processes)
        batch, metrics, began = sequences(chosen.tokens, LENGTH), [], 0.0
        for step in range(STEPS):
            if step == 1:  # the first one creates the state of the optimizer
                for process in processes:
                    reset_peak(process)
                began = time.perf_counter()
            metrics.append(train(engine, batch, step, lambda: None).metrics)
        seconds = (time.perf_counter() - began) / (STEPS - 1)
        published = Path(folder) / "published"
        engine.publish(published)
        stepping = max(resident_mib(pid, peak=True) for pid in processes)
        state = published.stat().st_size / 4 * TRAINED_BYTES / ranks / MIB  # published weights are in float32
        if ranks > 1:
            engine.close()
    return {
        "modules": modules,
        "starting": starting,
        "stepping": stepping,
        "state": state,
        "seconds": seconds,
        "loss": metrics[-1]["loss"],
        "grad_norm": metrics[-1]["grad_norm"],
    }


def main() -> None:
    """Run each number of ranks and print what they need."""
    parser = argparse.ArgumentParser(description="memory and time of ranks of the torch engine")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.only is not None:
        sys.stdout.write(json.dumps(measure(chosen.only, chosen)))
        return
    first: dict[str, Any] = {}
    for ranks in chosen.ranks:
        command = [sys.executable, *sys.argv, "--only", str(ranks)]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        first = first or found
        sys.stdout.write(
            f"{ranks} ranks: {found['stepping']:6.0f} MiB a rank ({found['stepping'] / first['stepping']:.0%}), "
            f"{found['starting']:6.0f} while it starts, {found['modules']:4.0f} of modules, "
            f"{found['state']:6.0f} of weights, gradients and optimizer; "
            f"{found['seconds']:6.2f} s a step, loss {found['loss']:.6f}, gradient norm {found['grad_norm']:.6f}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
