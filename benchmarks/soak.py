"""Check that nothing grows in a long run whose processes are killed all the time.

Runs the demo for `--steps` steps and kills a random part every `--every` steps. Every few seconds it samples the memory
of each process (PSS), the sizes of the store, the broker's folder, the logs and the rest of the run folder, open
descriptors and threads of the processes that are rarely restarted, and the broker's consumers, keys and cells. It
prints the figures of the first and the last quarter of the steps, draws all series over the steps, and exits with 1 if
a series grew by 10 % or more and by more than the noise. The first tenth of the steps, the start-up, is left out.

Figures are medians, and 95th percentiles for cells and files, which form a sawtooth: the floor rises with a checkpoint,
and the broker frees a file of its store when enough of it is unused. To see more than the first tooth, files of the
table are half as large here as by default (`broker.max_bytes`), and the bucket of leases, whose file is freed every
13,000 leases or half an hour, gets `LEASES` more per second. Two series are expected to grow: the run's record, which
is subtracted from the broker's folder, and the logs, each bounded by 4 MiB and one older file.

    python benchmarks/soak.py [--steps 2000] [--every 20] [--seed 1] [--picture docs/soak.png] [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import nats.errors
import numpy as np
from live_run import LiveRun
from process_memory import PROC, pss_mib
from recovery import TARGETS

from broker.errors import BrokerError
from relax_actors.runtime import logs

SAMPLE_SECONDS = 3.0
GROWTH = 0.10
STEP_DEADLINE = 180.0
LEASES = 100
NOISE = {"MiB": 3.0, "KiB": 64.0, "": 3.0}
"""Growth that cannot be distinguished from noise, by unit."""
LABELS = re.compile("^(memory|size) of ")
SAWTOOTH = ("size of", "cells of")
EXPECTED = ("table cells of record", "size of record", "size of logs")
SETTINGS = [
    "trainer.checkpoint_every=20",
    "trainer.warm_start.steps=2",
    "eval.every=50",
    "eval.rows=16",
    # Reached early, so that growth up to these bounds does not hide other growth.
    "broker.log_bytes=120000",
    "broker.max_bytes=16000000",
    "supervision.intensity=100000",
    "supervision.period=5",
]


@dataclass(frozen=True)
class Sample:
    """Values of all series at one moment, by (name, unit)."""

    step: int
    values: dict[tuple[str, str], float]


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; files that disappear meanwhile are ignored."""
    total = 0
    for head, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(head) / name).stat().st_blocks * 512
            except OSError:
                continue
    return total


def entries(pid: int, kind: str) -> int:
    """Open descriptors (`fd`) or threads (`task`) of a process; 0 if it has ended."""
    try:
        return sum(1 for _ in (PROC / str(pid) / kind).iterdir())
    except OSError:
        return 0


class Sampler(threading.Thread):
    """Takes a sample every few seconds until stopped."""

    def __init__(self, run: LiveRun) -> None:
        super().__init__(name="sampler", daemon=True)
        self.samples: list[Sample] = []
        self._run = run
        self._halt = threading.Event()

    def run(self) -> None:
        """Sample until stopped."""
        while not self._halt.wait(SAMPLE_SECONDS):
            self._write_leases()
            values = self._processes() | self._folders() | self._broker()
            self.samples.append(Sample(self._run.seen.steps, values))

    def _write_leases(self) -> None:
        """Write leases that no process reads, to fill the bucket's file."""
        lease = {
            "pid": 0,
            "incarnation": 0,
            "since": 0.0,
            "rows": [],
            "waits_for": "nothing: this lease only fills the bucket",
            "doing_since": 0.0,
        }

        async def work() -> None:
            for _ in range(int(LEASES * SAMPLE_SECONDS)):
                await self._run.state.renew_lease("soak", 0, lease, 10)

        try:
            self._run.connection.call(work(), 5)
        except (BrokerError, nats.errors.Error) as error:
            print(f"could not write leases: {error}", file=sys.stderr)

    def _processes(self) -> dict[tuple[str, str], float]:
        found: dict[tuple[str, str], float] = {}
        pids = self._run.pids()
        for name, members in pids.items():
            found[f"memory of {name}", "MiB"] = sum(map(pss_mib, members))
        if all(name in pids for name in TARGETS):
            found["memory of all", "MiB"] = sum(found.values())
        for name in ("root", "node", "zygote", "broker"):
            for pid in pids.get(name, [])[:1]:
                found[f"descriptors of {name}", ""] = entries(pid, "fd")
                found[f"threads of {name}", ""] = entries(pid, "task")
        return found

    def _folders(self) -> dict[tuple[str, str], float]:
        root, record = self._run.folder.root, self._run.seen.record
        names = ("store", "broker", "logs")
        sizes = {name: size_of(root / name) for name in names}
        sizes["rest"] = size_of(root) - sum(sizes.values())
        sizes |= {"broker": sizes["broker"] - record, "record": record}
        return {(f"size of {name}", "KiB"): size / 1024 for name, size in sizes.items()}

    def _broker(self) -> dict[tuple[str, str], float]:
        run, found = self._run, dict[tuple[str, str], float]()
        try:
            streams = run.connection.call(self._streams(), 5)
            cells = Counter(
                run.subjects.parse(subject).kind for subject in run.table.list_subjects(f"{run.subjects.prefix}.>")
            )
        except Exception as error:  # noqa: BLE001 the broker is being killed; the next sample follows
            print(f"no sample of the broker: {error}", file=sys.stderr)
            return found
        found["consumers", ""] = sum(consumers for consumers, _ in streams)
        found["KV keys", ""] = streams[-1][1]
        found["cells of rows", ""] = cells["group"] + cells["eval"]
        found["table cells of record", ""] = sum(cells.values()) - cells["group"] - cells["eval"]
        return found

    async def _streams(self) -> list[tuple[int, int]]:
        """Consumers and messages of each stream of the run."""
        subjects, js = self._run.subjects, self._run.connection.js
        names = (subjects.table_stream, subjects.log_stream, f"KV_{subjects.state_bucket}")
        states = [(await js.stream_info(name)).state for name in names]
        return [(state.consumer_count, state.messages) for state in states]

    def stop(self) -> None:
        """Stop sampling."""
        self._halt.set()
        self.join()


@dataclass(frozen=True)
class Series:
    """Figures of one series in the first and the last quarter of the steps."""

    name: str
    unit: str
    first: float
    last: float

    @property
    def growth(self) -> float:
        """Relative growth."""
        return (self.last - self.first) / self.first if self.first else 0.0

    @property
    def verdict(self) -> str:
        """`flat`, `grows`, or `expected` for series that must grow."""
        if self.name in EXPECTED:
            return "expected"
        return "grows" if self.growth >= GROWTH and self.last - self.first > NOISE[self.unit] else "flat"


def judge(samples: list[Sample], steps: int) -> list[Series]:
    """Compute the series of a soak test."""
    found = []
    start, quarter = steps // 10, steps // 4
    for key in sorted({key for sample in samples for key in sample.values}):
        early = [s.values[key] for s in samples if key in s.values and start <= s.step < start + quarter]
        late = [s.values[key] for s in samples if key in s.values and s.step >= steps - quarter]
        if early and late:
            percent = 95 if key[0].startswith(SAWTOOTH) else 50
            found.append(Series(*key, *(float(np.percentile(values, percent)) for values in (early, late))))
    return found


def draw(samples: list[Sample], path: Path, title: str) -> None:
    """Draw the series over the steps."""
    import matplotlib as mpl  # noqa: PLC0415 needed for a picture only

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    panels = {
        "memory (PSS), MiB": lambda n: n.startswith("memory of"),
        "files, KiB": lambda n: n.startswith("size of"),
        "descriptors and threads": lambda n: n.startswith(("descriptors", "threads")),
        "broker: consumers, keys, cells": lambda n: n in ("consumers", "KV keys", "cells of rows"),
    }
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), dpi=70)
    for place, (label, belongs) in zip(axes.flat, panels.items(), strict=True):
        for name, unit in sorted({key for s in samples for key in s.values if belongs(key[0])}):
            points = [(s.step, s.values[name, unit]) for s in samples if (name, unit) in s.values]
            place.plot(*zip(*points, strict=True), label=LABELS.sub("", name), linewidth=0.9)
        place.set(title=label, xlabel="step", ylim=(0, None))
        place.legend(fontsize=6, ncols=2)
        place.grid(alpha=0.3)
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    # 64 colours reduce the size of the file to a fraction.
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(64)
    small.save(path, optimize=True)


def soak(steps: int, every: int, seed: int, folder: Path) -> tuple[list[Sample], dict[str, object]]:
    """Run, kill, sample; return the samples and the result of the run."""
    source = random.Random(seed)  # noqa: S311 not a secret
    run = LiveRun(folder, [f"run.steps={steps + 1000}", *SETTINGS])
    sampler = Sampler(run)
    began = time.monotonic()
    killed: Counter[str] = Counter()
    try:
        run.wait_for_steps(1)
        sampler.start()
        for step in range(every, steps, every):
            run.wait_for_steps(step, STEP_DEADLINE)
            target = source.choice(TARGETS)
            run.kill(target)
            killed[target] += 1
            print(f"step {step}: killed {target}", file=sys.stderr)
        run.wait_for_steps(steps, STEP_DEADLINE)
        sampler.stop()
        result = {"lost": run.lost(), "account": run.account(), "killed": dict(killed)}
    finally:
        run.stop()
    return sampler.samples, {**result, "seconds": round(time.monotonic() - began)}


def main() -> None:
    """Print the table; exit code 1 if a series grows or a trajectory is lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logs.configure(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        samples, result = soak(options.steps, options.every, options.seed, Path(scratch) / "soak")
    kills = sum(result["killed"].values())  # type: ignore[attr-defined]
    title = f"{options.steps} steps, {kills} kills"
    if options.picture:
        draw(samples, options.picture, title)
    series = judge(samples, options.steps)
    print(f"{title}, {result['seconds']} s, {len(samples)} samples: {result['killed']}")
    print(f"{'':26} {'first quarter':>14} {'last quarter':>14} {'growth':>8}  verdict")
    for one in series:
        print(
            f"{one.name + (f' ({one.unit})' if one.unit else ''):26} {one.first:14.1f} {one.last:14.1f} "
            f"{one.growth:8.1%}  {one.verdict}"
        )
    print(f"lost {len(result['lost'])}", *result["lost"][:5], sep="\n  ")  # type: ignore[arg-type,index]
    print("rows: " + ", ".join(f"{name} {n}" for name, n in result["account"].items()))  # type: ignore[attr-defined]
    if options.json:
        print(json.dumps({**result, "series": [vars(s) | {"verdict": s.verdict} for s in series]}))
    sys.exit(1 if result["lost"] or any(s.verdict == "grows" for s in series) else 0)


if __name__ == "__main__":
    main()
