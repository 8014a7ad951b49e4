"""Compare bytes and seconds of a weight delta with those of a full set, and measure the pause of a swap.

    python benchmarks/weights.py                       # 0.5 B parameters, 16 GB of memory, some minutes
    python benchmarks/weights.py --layers 2 --json     # a small model
    python benchmarks/weights.py --ranks 1,2,4         # versions that ranks of Megatron-Core write, each its share

A model of the shape of Qwen2.5-0.5B (494 M parameters, random weights of standard deviation 0.02, bfloat16 on the way,
float32 in the optimizer) takes `--steps` real steps of AdamW on random tokens at each learning rate, each rate in a
separate process. After each step the engines work as in a run: the trainer's writes the delta, and the full set for
comparison; the rollout's reads the delta into its copy in host memory, verifies the fingerprint and stages the tensors
(in a run in the background), and then swaps. The pause is the swap alone. At the end the serving model must have the
trainer's fingerprint.

Forward and backward are in float32, since few CPUs have fast bfloat16 arithmetic; the published weights are bfloat16.

With `--ranks`, groups of ranks train a smaller model (48 M parameters) and publish it: bytes and seconds of a version,
of the model folder and of a reader, and by how much the memory of a rank grows meanwhile, at most. Two ranks share
tensors, four share tensors and layers.

Not measured: the network or disk between two machines (files are in the page cache), and the weights of a trained
model, whose distribution may differ from that of random weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from process_memory import reset_peak, resident_mib
from rich.console import Console
from rich.table import Table

from relax_actors.config import validate
from relax_actors.data.model_folder import prepare
from relax_actors.engines.protocols import TrainSample, train
from relax_actors.engines.ranks.group import TrainerGroup
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import tensors_of
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.weights import files as weights
from relax_actors.weights.encoder import LocalSource, WeightEncoder
from relax_actors.weights.host_copy import HostCopy
from relax_actors.weights.protocols import WeightUpdate

T = TypeVar("T")
RATES = ("1e-06", "1e-05")
SECONDS = 1800.0


def config_of(folder: Path, layers: int, rate: str) -> Any:
    """Return the configuration of the run; creates the model folder."""
    architecture = {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": layers,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    config = validate(
        {
            "run": {"folder": str(folder)},
            "model": {"architecture": architecture, "tokenizer": {"alphabet": "0123456789#"}},
            "data": {"kind": "python", "function": "nothing"},
            "trainer": {"learning_rate": float(rate)},
        },
        "benchmark",
    )
    prepare(config, config.model_path)
    return config


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds of a call, and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def batch_of(step: int, vocabulary: int) -> list[TrainSample]:
    """Batch of four samples of 32 random tokens."""
    source = np.random.default_rng(step)
    tokens = [source.integers(0, vocabulary, 40, dtype=np.int32) for _ in range(4)]
    logprobs = np.full(32, -np.log(vocabulary), np.float32)
    advantages = source.normal(size=4).astype(np.float32)
    return [
        TrainSample.of_completion(t[:8], t[8:], logprobs=logprobs, advantages=np.full(32, a, np.float32))
        for t, a in zip(tokens, advantages, strict=True)
    ]


def measure(folder: Path, layers: int, rate: str, steps: int) -> dict[str, Any]:
    """Step and transfer the weights; return the figures of the last step and the longest pause of all swaps."""
    torch.set_num_threads(1)
    config = config_of(folder, layers, rate)
    trainer = TorchEngine(config)
    own = tensors_of(trainer.model)
    sender = WeightEncoder(LocalSource(lambda: own, torch.bfloat16, nullcontext()), keep_base=True)
    rollout = TransformersEngine(config.model_path, dtype=torch.bfloat16)
    whole, delta = folder / "whole.safetensors", folder / "delta.safetensors"
    sender.write_full(whole)
    sender.set_base()
    copy = HostCopy()
    copy.apply([WeightUpdate(0, sender.fingerprint(), [whole])])
    rollout.stage(0, copy.tensors)
    rollout.swap()
    found: dict[str, Any] = {"parameters": sum(t.numel() for t in own.values())}
    pauses = []
    for step in range(steps):
        found["step_seconds"], _ = timed(lambda step=step: train(trainer, batch_of(step, 151936), step, lambda: None))
        sender.invalidate()
        # The conversion to bfloat16 and the fingerprint are the same work for both ways.
        found["prepare_seconds"], fingerprint = timed(sender.fingerprint)
        found["whole_write_seconds"], _ = timed(lambda: sender.write_full(whole))
        found["delta_encode_seconds"], write = timed(sender.delta_writer)
        if write is None:
            sys.exit(f"at rate {rate} the delta is larger than half of the full set")
        found["delta_write_seconds"], _ = timed(lambda write=write: write(delta))
        sender.set_base()
        found["whole_read_seconds"], _ = timed(lambda f=fingerprint: HostCopy().apply([WeightUpdate(0, f, [whole])]))
        way = [WeightUpdate(step + 1, fingerprint, [delta])]
        found["delta_read_seconds"], _ = timed(lambda way=way: copy.apply(way))
        found["stage_seconds"], _ = timed(lambda step=step: rollout.stage(step + 1, copy.tensors))
        pause, _ = timed(rollout.swap)
        pauses.append(1000 * pause)
        sizes = [path.stat().st_size for path in (whole, delta)]
        found |= {"whole_bytes": sizes[0], "delta_bytes": sizes[1], "share": sizes[1] / sizes[0]}
        if weights.fingerprint(tensors_of(rollout.model)) != fingerprint:
            sys.exit(f"at rate {rate}, step {step}: the serving model differs from the trained model")
    return found | {"pause_ms": max(pauses)}


def run(layers: int, rate: str, steps: int) -> dict[str, Any]:
    """Measure in a separate process."""
    command = [sys.executable, __file__, "--layers", str(layers), "--steps", str(steps), "--rate", rate]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        sys.exit(f"rate {rate} ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def report(results: dict[str, dict[str, Any]], console: Console) -> None:
    """Print the figures."""
    first = next(iter(results.values()))
    table = Table(title=f"{first['parameters'] / 1e6:.0f} M parameters, last of several AdamW steps")
    for column in ("", *(f"rate {rate}" for rate in results)):
        table.add_column(column)
    rows = {
        "full set, MB": lambda r: f"{r['whole_bytes'] / 1e6:.1f}",
        "delta, MB": lambda r: f"{r['delta_bytes'] / 1e6:.1f}",
        "delta / full set": lambda r: f"{100 * r['share']:.2f} %",
        "optimizer step, s": lambda r: f"{r['step_seconds']:.2f}",
        "convert and fingerprint, s": lambda r: f"{r['prepare_seconds']:.2f}",
        "write full set, s": lambda r: f"{r['whole_write_seconds']:.2f}",
        "encode and write delta, s": lambda r: f"{r['delta_encode_seconds'] + r['delta_write_seconds']:.2f}",
        "read and verify full set, s": lambda r: f"{r['whole_read_seconds']:.2f}",
        "read, apply and verify delta, s": lambda r: f"{r['delta_read_seconds']:.2f}",
        "stage, s": lambda r: f"{r['stage_seconds']:.2f}",
        "longest pause of a swap, ms": lambda r: f"{r['pause_ms']:.2f}",
    }
    for name, shown in rows.items():
        table.add_row(name, *(shown(result) for result in results.values()))
    console.print(table)


LAYOUTS: dict[int, dict[str, int]] = {
    1: {},
    2: {"tensor_parallel": 2},
    4: {"tensor_parallel": 2, "pipeline_parallel": 2},
}
"""Layouts of `--ranks`."""
WIDE = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32768,
    "tie_word_embeddings": True,
}


def growth_mb(pids: list[int], work: Callable[[], T]) -> tuple[float, float, T]:
    """Return the seconds of a call, the most by which a process grew meanwhile, and the result of the call."""
    before = {}
    for pid in pids:
        reset_peak(pid)
        before[pid] = resident_mib(pid)
    seconds, result = timed(work)
    return seconds, max((resident_mib(pid, peak=True) - before[pid]) * 2**20 / 1e6 for pid in pids), result


def trained_group(folder: Path, ranks: int, delta: str) -> tuple[TrainerGroup, list[Path], HostCopy]:
    """Train two steps after a version; return the ranks, the files of the next one, and a copy of this one."""
    sections = {
        "run": {"folder": str(folder / delta)},
        "model": {"architecture": WIDE, "tokenizer": {"alphabet": "0123456789#"}},
        "data": {"kind": "python", "function": "nothing"},
        "weights": {"delta": delta},
        "trainer": {"backend": "megatron", "precision": "bfloat16", "learning_rate": 1e-6}
        | {"megatron": {"ranks": ranks, **LAYOUTS[ranks]}},
    }
    config = validate(sections, "benchmark")
    prepare(config, config.model_path)
    group = TrainerGroup(config)
    group.initialise(5)
    group.finish_warm_start()
    base, paths = ([folder / f"{delta}.{version}.{n}" for n in range(group.shards)] for version in (0, 1))
    copy = HostCopy()
    copy.apply([WeightUpdate(0, group.publish(*base), base)])
    group.remember()
    for step in range(2):
        train(group, batch_of(step, WIDE["vocab_size"]), step, lambda: None)
    return group, paths, copy


def measure_ranks(folder: Path, ranks: int) -> dict[str, Any]:
    """Publish a delta, then without deltas a full set and a model folder."""
    found: dict[str, Any] = {}
    group, paths, copy = trained_group(folder, ranks, "auto")
    found["delta_encode_seconds"], write = timed(group.delta)
    if write is None:
        sys.exit("the delta is larger than half of the full set")
    found["delta_write_seconds"], fingerprint = timed(partial(write, *paths))
    found["delta_bytes"] = [path.stat().st_size for path in paths]
    found["delta_read_seconds"], _ = timed(partial(copy.apply, [WeightUpdate(1, fingerprint, paths)]))
    group.close()
    group, paths, copy = trained_group(folder, ranks, "off")
    whole = growth_mb(group.pids, partial(group.publish, *paths))
    found["publish_seconds"], found["publish_growth_mb"], found["fingerprint"] = whole
    found["whole_bytes"] = [path.stat().st_size for path in paths]
    found["whole_read_seconds"], _ = timed(partial(copy.apply, [WeightUpdate(1, found["fingerprint"], paths)]))
    export = growth_mb(group.pids, partial(group.export, folder / "model"))
    found["export_seconds"], found["export_growth_mb"], _ = export
    group.close()
    return found


def report_ranks(results: dict[int, dict[str, Any]], console: Console) -> None:
    """Print the figures of `--ranks`."""
    table = Table(title="versions of 48 M parameters in bfloat16, written by ranks")
    for column in ("", *(f"{ranks} ranks" for ranks in results)):
        table.add_column(column)
    rows = {
        "full set, MB": lambda r: f"{sum(r['whole_bytes']) / 1e6:.1f}",
        "largest file of it, MB": lambda r: f"{max(r['whole_bytes']) / 1e6:.1f}",
        "assemble, fingerprint and write it, s": lambda r: f"{r['publish_seconds']:.2f}",
        "growth of a rank meanwhile, MB": lambda r: f"{r['publish_growth_mb']:.1f}",
        "read and verify it, s": lambda r: f"{r['whole_read_seconds']:.2f}",
        "delta, MB": lambda r: f"{sum(r['delta_bytes']) / 1e6:.1f}",
        "assemble, fingerprint, encode and write it, s": lambda r: (
            f"{r['delta_encode_seconds'] + r['delta_write_seconds']:.2f}"
        ),
        "read, apply and verify it, s": lambda r: f"{r['delta_read_seconds']:.2f}",
        "write the model folder, s": lambda r: f"{r['export_seconds']:.2f}",
        "growth of a rank meanwhile, MB ": lambda r: f"{r['export_growth_mb']:.1f}",
    }
    for name, shown in rows.items():
        table.add_row(name, *(shown(result) for result in results.values()))
    console.print(table)


def compare_ranks(counts: list[int], *, as_json: bool) -> None:
    """Measure and report each number of ranks."""
    results = {}
    for ranks in counts:
        with tempfile.TemporaryDirectory(prefix="weights-") as folder:
            results[ranks] = measure_ranks(Path(folder), ranks)
    report_ranks(results, Console(stderr=as_json))
    if as_json:
        print(json.dumps(results))


def main() -> None:
    """Measure each rate and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rate", help="measure only this learning rate, in this process")
    parser.add_argument("--ranks", help="numbers of ranks of Megatron-Core to compare, such as 1,2,4")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.ranks:
        compare_ranks([int(count) for count in arguments.ranks.split(",")], as_json=arguments.json)
        return
    if arguments.rate:
        with tempfile.TemporaryDirectory(prefix="weights-") as folder:
            print(json.dumps(measure(Path(folder), arguments.layers, arguments.rate, arguments.steps)))
        return
    results = {rate: run(arguments.layers, rate, arguments.steps) for rate in RATES}
    report(results, Console(stderr=arguments.json))
    if arguments.json:
        shares = {f"share_{rate}": round(result["share"], 5) for rate, result in results.items()}
        pause = max(result["pause_ms"] for result in results.values())
        print(json.dumps(shares | {"pause_ms": round(pause, 3), "results": results}))


if __name__ == "__main__":
    main()
