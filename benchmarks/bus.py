"""Compare the table (cells and segments) with TransferQueue 0.1.11 on the same work.

    python benchmarks/bus.py                    # creates TransferQueue's environment first, 2 GB
    python benchmarks/bus.py --tq-python PYTHON --json

A batch is 64 samples: prompt of 256 and response of 1,024 tokens int64, log-probs float32, 0.9 MB. Producer and
consumer are one process each; the bus has its own processes. The table writes one cell per group of 8, and the arrays
of a batch into one segment, like a rollout whose rows end together. It reads them with the standing pull of a pool
actor: checksum, decoding, acknowledgement, purge of the batch. TransferQueue puts a batch in one call and reads it with
`get_meta`, `get_data` and `clear_samples`. Both consumers add up all elements and check the sum.

    put         the producer alone
    get         the consumer alone, after all batches are written
    pipelined   both at once, from the first put to the release of the last batch
    cpu         of all processes during `pipelined`, per sample
    latency     one batch at a time, from before the put to after the release
    memory      PSS of the bus's processes holding `--batches` batches, without producer and consumer; for the table
                plus the bytes of the segments, which are files

Limits of the comparison: one host only. TransferQueue also moves data between hosts, where the table needs a shared
folder; it tracks readiness by sample and field, and Ray's memory is shared with the rest of a Ray job. TransferQueue
consumes samples on request, the table on acknowledgement. The table's data is on disk (without fsync) and survives a
kill of the bus.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from bus_table_side import start_server
from bus_workload import MARK, Workload
from process_memory import pss_mib, tree
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
REQUIREMENTS = ("torch==2.13.0", "transferqueue==0.1.11")
ANSWER_SECONDS = 180.0
MIB = 1 << 20
TOKEN = secrets.token_hex(32)
"""Restricts access to the Ray cluster that this benchmark starts."""
TICKS = os.sysconf("SC_CLK_TCK")
LESS_IS_BETTER = ("latency_ms", "cpu_us", "memory_mib", "processes")
Figures = dict[str, float]


class Side:
    """One process of a side; it answers commands line by line."""

    def __init__(self, command: list[str], log: IO[str]) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
        }
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)
        self._command = " ".join(command[1:3])
        self._log = log
        self.greeting = self.answer()

    def answer(self) -> str:
        """Return the next marked line of its output."""
        timer = threading.Timer(ANSWER_SECONDS, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout or ():
                if line.startswith(MARK):
                    return line.removeprefix(MARK).strip()
        finally:
            timer.cancel()
        text = Path(self._log.name).read_text()[-2000:]
        sys.exit(f"{self._command} ended, or gave no answer within {ANSWER_SECONDS:g} s; end of its log:\n{text}")

    def start(self, name: str, first: int, count: int) -> None:
        """Start one piece of work."""
        print(name, first, count, file=self.process.stdin, flush=True)

    def times(self) -> tuple[float, float]:
        """Wait for the work and return when it began and ended."""
        found = json.loads(self.answer())
        return found["began"], found["ended"]

    def close(self) -> None:
        """End the process."""
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def durable_table(folder: Path) -> Iterator[tuple[list[str], Workload, list[int]]]:
    """Run a nats-server; yield the command of a side, its workload, and the process ids of the bus."""
    server = start_server(folder)
    try:
        process = server.process.pid if server.process else 0
        yield [sys.executable, str(HERE / "bus_table_side.py")], Workload(str(folder)), [process]
    finally:
        server.stop()


@contextmanager
def transfer_queue(python: Path, folder: Path, log: IO[str]) -> Iterator[tuple[list[str], Workload, list[int]]]:
    """Run Ray, the controller and two storage units; yields as `durable_table`."""
    command = [str(python), str(HERE / "bus_tq_side.py")]
    bus = Side([*command, "bus", Workload(str(folder)).json()], log)
    try:
        yield command, Workload(bus.greeting), [p for p in tree(bus.process.pid) if p != bus.process.pid]
    finally:
        bus.close()


def cpu_seconds(process: int) -> float:
    """CPU seconds of a process so far; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(side: str, batches: int, python: Path, folder: Path) -> Figures:
    """Measure one turn of a side: samples per second, latency in ms, memory in MiB."""
    with ExitStack() as stack:
        log = stack.enter_context((folder / f"{side}.log").open("w"))
        bus = durable_table(folder) if side == "table" else transfer_queue(python, folder, log)
        command, work, processes = stack.enter_context(bus)
        producer = Side([*command, "put", work.json()], log)
        stack.callback(producer.close)
        consumer = Side([*command, "get", work.json()], log)
        stack.callback(consumer.close)
        number = 0

        def together(count: int) -> float:
            nonlocal number
            consumer.start("get", number, count)
            producer.start("put", number, count)
            number += count
            began, ended = producer.times()[0], consumer.times()[1]
            return ended - began

        together(3)
        producer.start("put", number, batches)
        began, ended = producer.times()
        put = ended - began
        memory = sum(pss_mib(process) for process in processes)
        held = sum(path.stat().st_size for path in (folder / "store").rglob("*") if path.is_file()) / MIB
        consumer.start("get", number, batches)
        began, ended = consumer.times()
        number += batches
        get = ended - began
        everyone = [*processes, *tree(producer.process.pid), *tree(consumer.process.pid)]
        before = sum(map(cpu_seconds, everyone))
        pipelined = together(batches)
        cpu = sum(map(cpu_seconds, everyone)) - before
        latency = statistics.median(together(1) for _ in range(20))
    samples = batches * work.samples
    return {
        "put": samples / put,
        "get": samples / get,
        "pipelined": samples / pipelined,
        "latency_ms": 1000 * latency,
        "cpu_us": 1e6 * cpu / samples,
        "memory_mib": memory + held,
        "processes": len(processes),
    }


def tq_python(folder: Path) -> Path:
    """Return the interpreter of TransferQueue's environment in `folder`; create the environment if it is missing."""
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        for requirement in REQUIREMENTS:  # torch first, so that pip keeps this version
            subprocess.run([python, "-m", "pip", "install", "--quiet", requirement], check=True)
        done.touch()
    return python


def report(sides: dict[str, list[Figures]], console: Console) -> Figures:
    """Print the figures; return medians and ratios, above 1 where the table is better."""
    medians = {
        side: {name: statistics.median(r[name] for r in runs) for name in runs[0]} for side, runs in sides.items()
    }
    table = Table(title="medians (lowest to highest)")
    for column in ("", *sides, *(["ratio"] if "tq" in sides else [])):
        table.add_column(column)
    figures: Figures = {}
    for name, mine in medians["table"].items():
        less_is_better = name in LESS_IS_BETTER
        spans = {side: [r[name] for r in runs] for side, runs in sides.items()}
        shown = [f"{medians[s][name]:,.1f} ({min(v):,.1f} to {max(v):,.1f})" for s, v in spans.items()]
        figures |= {f"{side}_{name}": round(medians[side][name], 1) for side in sides}
        if "tq" in medians:
            theirs = medians["tq"][name]
            ratio = theirs / mine if less_is_better else mine / theirs
            key = name.removesuffix("_ms").removesuffix("_mib").removesuffix("_us")
            figures[f"ratio_{key}"] = round(ratio, 3)
            shown.append(f"{ratio:.2f}")
        table.add_row(name if less_is_better else f"{name}, samples/s", *shown)
    console.print(table)
    return figures


def main() -> None:
    """Run the sides interleaved and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--venv", type=Path, default=HERE.parent / ".bench" / "tq-venv")
    parser.add_argument("--tq-python", type=Path, help="interpreter with TransferQueue, instead of --venv")
    parser.add_argument("--folder", type=Path, help="folder of the table (default: a temporary folder)")
    parser.add_argument("--table-only", action="store_true", help="leave TransferQueue out")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    console = Console(stderr=arguments.json)
    sides: dict[str, list[Figures]] = {"table": []}
    python = Path(sys.executable)
    if not arguments.table_only:
        sides["tq"] = []
        python = arguments.tq_python or tq_python(arguments.venv)
    for turn in range(arguments.repeats):
        for side, runs in sides.items():
            folder = Path(tempfile.mkdtemp(prefix="bus-", dir=arguments.folder if side == "table" else None))
            runs.append(measure(side, arguments.batches, python, folder))
            shutil.rmtree(folder, ignore_errors=True)
        load = os.getloadavg()[0]
        console.print(f"turn {turn + 1} of {arguments.repeats} done, load average {load:.1f}", highlight=False)
    figures = report(sides, console)
    if arguments.json:
        print(json.dumps(figures | {"batches": arguments.batches, "repeats": arguments.repeats}))


if __name__ == "__main__":
    main()
