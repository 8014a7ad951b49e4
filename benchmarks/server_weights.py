"""Seconds and memory of a weight update of an SGLang server: by a file, by shared memory, by a broadcast.

    python benchmarks/server_weights.py [--hidden 576] [--layers 30] [--vocabulary 49152] [--repeats 5] [--json]

The default is about the size of SmolLM2-135M, in bfloat16. The ways take turns, each with other weights. `stage` is the
actor's copy of verified weights, `load` the time until the server has answered. Memory is what a process of the actor
or of the server has of its own (RssAnon), at most during the load, beyond what it had before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from engines import Size, config_of, server_of
from process_memory import tree

from relax_actors.engines.protocols.server import ServerRecord
from relax_actors.engines.sglang.server import Server
from relax_actors.engines.sglang.weight_loaders import BroadcastLoader, FileLoader, StagedWeights, WeightLoader
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.weights import files as weights

MIB = 1 << 20


class OwnMemory(threading.Thread):
    """Samples the memory that processes share with no other; `peak` is the largest growth of one of them, in MiB."""

    def __init__(self, processes: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._before = {pid: own_mib(pid) for pid in processes}
        self._ended = threading.Event()
        self.peak = 0.0

    def run(self) -> None:
        """Sample until stopped."""
        while not self._ended.wait(0.005):
            self.peak = max(self.peak, *(own_mib(pid) - before for pid, before in self._before.items()))

    def stop(self) -> None:
        """End the samples."""
        self._ended.set()
        self.join()


def own_mib(pid: int) -> float:
    """Return RssAnon of a process in MiB; 0 if it has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))
    return 0.0


def measure(loader: WeightLoader, server: Server, tensors: dict[str, torch.Tensor], version: int) -> dict[str, float]:
    """Stage and load a version; each has different numbers."""
    changed = {name: tensor + version for name, tensor in tensors.items()}
    staged, began = StagedWeights(version, weights.fingerprint(changed)), time.perf_counter()
    loader.stage(staged, changed)
    loaded = time.perf_counter()
    del changed
    samplers = [OwnMemory(processes) for processes in (tree(server.record.process_group), [os.getpid()])]
    for sampler in samplers:
        sampler.start()
    loader.load(server, staged)
    ended = time.perf_counter()
    for sampler in samplers:
        sampler.stop()
    loader.forget(staged)
    grown = {"server_mib": samplers[0].peak, "actor_mib": samplers[1].peak}
    return {"stage_seconds": loaded - began, "load_seconds": ended - loaded} | grown


def compare(folder: Path, size: Size, repeats: int, device: str = "cpu") -> dict[str, dict[str, float]]:
    """Return the medians of each way's figures, for a server on a device; prints the size of the weights."""
    config = config_of(folder / "run", size, device)
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(build(config.model_path, seed=0)).items()}
    total, largest = (of(tensor.nbytes for tensor in tensors.values()) / MIB for of in (sum, max))
    print(f"{total:.0f} MiB of weights, largest tensor {largest:.0f} MiB")
    ways: dict[str, WeightLoader] = {
        "disk": FileLoader(folder / "disk"),
        "shared": FileLoader(folder / "shared", in_memory=True),
        "group": BroadcastLoader(1),
    }
    measured: dict[str, list[dict[str, float]]] = defaultdict(list)
    with server_of(config) as path:
        record = ServerRecord.load(path)
        assert record is not None  # noqa: S101 `server_of` waits for it
        server = Server(record)
        for repeat in range(repeats + 1):
            for number, (way, loader) in enumerate(ways.items()):
                figures = measure(loader, server, tensors, len(ways) * repeat + number)
                measured[way] += [figures] if repeat else []  # the first load starts threads and groups
        for loader in ways.values():
            loader.close()
        server.close()
    return {way: {key: statistics.median(m[key] for m in all_) for key in all_[0]} for way, all_ in measured.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        size = Size(options.hidden, options.layers, options.vocabulary, "bfloat16")
        medians = compare(Path(scratch), size, options.repeats)
    for way, figures in medians.items():
        print(f"{way:8}" + "".join(f"{key} {value:<9.3f}" for key, value in figures.items()))
    if options.json:
        print(json.dumps(medians))


if __name__ == "__main__":
    main()
