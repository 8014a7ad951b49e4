"""Seconds and memory of a weight update of an SGLang server: by a file, by shared memory, by a broadcast.

    python benchmarks/server_weights.py [--hidden 576] [--layers 30] [--vocabulary 49152] [--repeats 5] [--json]
    python benchmarks/server_weights.py --actors 1,2,4    # actors of a node that follow deltas, without servers

The default is about the size of SmolLM2-135M, in bfloat16. The ways take turns, each with other weights. `stage` is the
actor's copy of verified weights, `load` the time until the server has answered. Memory is what a process of the actor
or of the server has of its own (RssAnon), at most during the load, beyond what it had before.

With `--actors` each actor is a process that advances its copy from version to version and stages it. The figures are
the seconds until all have staged a version, and what the node holds afterwards: memory that the processes have of their
own beyond that before the first version, memory without a name, and files, each counted once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
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
from relax_actors.weights import deltas
from relax_actors.weights import files as weights
from relax_actors.weights.host_copy import HostCopy
from relax_actors.weights.node_sets import FILE, MEMORY, NodeSet
from relax_actors.weights.protocols import WeightUpdate

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


def follow(folder: Path, way: str) -> None:
    """Be an actor: stage the version of each line of stdin, a fingerprint and a file, and answer with a line."""
    loader = FileLoader(folder / "room", in_memory=way == "shared")
    copy = HostCopy(loader.sets)
    before: StagedWeights | None = None
    print("ready", flush=True)
    for version, line in enumerate(sys.stdin):
        fingerprint, file = line.split()
        copy.apply([WeightUpdate(version, fingerprint, [Path(file)])])
        assert isinstance(copy.tensors, NodeSet)  # noqa: S101 the copy has sets
        staged = StagedWeights(version, fingerprint)
        loader.stage(staged, copy.tensors, copy.tensors)
        if before is not None:
            loader.forget(before)
        before = staged
        print("staged", flush=True)


def held_mib(pids: Sequence[int], room: Path) -> dict[str, float]:
    """Return MiB of memory and of files that processes hold, each once."""
    own = sum(map(own_mib, pids))
    opened = [entry for pid in pids for entry in Path(f"/proc/{pid}/fd").iterdir() if MEMORY in str(entry.readlink())]
    sizes = [
        {(status.st_dev, status.st_ino): status.st_blocks * 512 for status in map(Path.stat, paths)}
        for paths in (opened, [path for path in room.glob(f"*/*/{FILE}") if not path.is_symlink()])
    ]
    memory, files = (sum(of.values()) / MIB for of in sizes)
    return {"own_mib": own, "memory_mib": memory, "files_mib": files}


def follow_deltas(folder: Path, size: Size, way: str, count: int, repeats: int) -> dict[str, float]:
    """Have actors follow a full set and deltas that change a hundredth of the numbers; return the figures."""
    config = config_of(folder / "run", size, "cpu")
    before = {name: tensor.bfloat16() for name, tensor in tensors_of(build(config.model_path, seed=0)).items()}
    command = [sys.executable, __file__, "--follow", str(folder), "--way", way]
    actors = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    pids, seconds = [actor.pid for actor in actors], []

    def said() -> None:
        for actor in actors:
            if actor.stdout is None or not actor.stdout.readline():
                sys.exit("an actor has ended")

    said()
    rest = held_mib(pids, folder / "room")["own_mib"]
    weights.save(before, folder / "0")
    for version in range(repeats + 1):
        if version:
            after = {name: torch.where(torch.rand(t.shape) < 0.01, t * 1.01, t) for name, t in before.items()}
            weights.save(deltas.encode(before, after), folder / str(version), weights.fingerprint(before))
            before = after
        line, began = f"{weights.fingerprint(before)} {folder / str(version)}\n", time.perf_counter()
        for actor in actors:
            assert actor.stdin is not None  # noqa: S101 a pipe
            actor.stdin.write(line)
            actor.stdin.flush()
        said()
        seconds += [time.perf_counter() - began] if version else []
    figures = held_mib(pids, folder / "room")
    for actor in actors:
        actor.communicate()
    return {"seconds": statistics.median(seconds)} | figures | {"own_mib": figures["own_mib"] - rest}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--actors", help="numbers of actors of a node, such as 1,2,4")
    parser.add_argument("--follow", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--way", default="shared", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.follow:
        follow(options.follow, options.way)
        return
    if options.actors:
        size = Size(options.hidden, options.layers, options.vocabulary, "bfloat16")
        for way in ("disk", "shared"):
            for count in map(int, options.actors.split(",")):
                with tempfile.TemporaryDirectory() as scratch:
                    of_actors = follow_deltas(Path(scratch), size, way, count, options.repeats)
                print(f"{way:8}{count} " + "".join(f"{key} {value:<9.3f}" for key, value in of_actors.items()))
        return
    with tempfile.TemporaryDirectory() as scratch:
        size = Size(options.hidden, options.layers, options.vocabulary, "bfloat16")
        medians = compare(Path(scratch), size, options.repeats)
    for way, figures in medians.items():
        print(f"{way:8}" + "".join(f"{key} {value:<9.3f}" for key, value in figures.items()))
    if options.json:
        print(json.dumps(medians))


if __name__ == "__main__":
    main()
