"""The table (cells plus segments) beside TransferQueue 0.1.11, on the same work in one run.

    python benchmarks/bus.py                    # makes TransferQueue's environment first, 2 GB
    python benchmarks/bus.py --tq-python PYTHON --json

A batch is 64 samples: prompt of 256 and response of 1,024 tokens int64, log-probs float32, 0.9 MB. Producer and
consumer are a process each, and the bus others still. Ours writes one cell a group of 8, its arrays in a segment, as a
rollout does, and takes them with the standing pull of a pool's actor: checksum, decoding, acknowledgement, purge of the
batch. Theirs puts a batch in one call, and takes it by `get_meta`, `get_data` and `clear_samples`. The consumer of
either adds all elements up and compares the sum.

put: the producer alone. get: the consumer alone, all batches being there. pipelined: both at once, from the first put
to the last batch let go; cpu is that of all processes meanwhile, for a sample. latency: one batch at a time, from
before the put to after the letting go. Memory is the PSS of the bus's processes while it holds `--batches` batches,
producer and consumer not counted; for ours the bytes of the segments are added, which lie in files.

To be said with any figure: one host. TransferQueue also moves data between hosts, where ours needs a folder that both
see; it tracks readiness by sample and field, and the memory of Ray is shared with the rest of a Ray job. Its samples
are consumed when asked for, ours when acknowledged; ours are on disk (not forced to it) and outlive a kill of the bus.
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

from bus_workload import MARK, Workload
from process_memory import pss_mib, tree
from rich.console import Console
from rich.table import Table

from broker.server import Server

HERE = Path(__file__).resolve().parent
REQUIREMENTS = ("torch==2.13.0", "transferqueue==0.1.11")
ANSWER_SECONDS = 180.0
MIB = 1 << 20
TOKEN = secrets.token_hex(32)
"""Lets only our processes reach the Ray that we start."""
TICKS = os.sysconf("SC_CLK_TCK")
LESS_IS_BETTER = ("latency_ms", "cpu_us", "memory_limit_mib", "processes")
Figures = dict[str, float]


class Side:
    """One process of a side, which answers commands line by line."""

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
        """The next line that is meant for us."""
        timer = threading.Timer(ANSWER_SECONDS, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout or ():
                if line.startswith(MARK):
                    return line.removeprefix(MARK).strip()
        finally:
            timer.cancel()
        text = Path(self._log.name).read_text()[-2000:]
        sys.exit(f"{self._command} gave no answer within {ANSWER_SECONDS:g} s, or ended; the end of its log:\n{text}")

    def tell(self, name: str, first: int, count: int) -> None:
        """Begin some work."""
        print(name, first, count, file=self.process.stdin, flush=True)

    def times(self) -> tuple[float, float]:
        """When the work that was begun began and ended."""
        found = json.loads(self.answer())
        return found["began"], found["ended"]

    def close(self) -> None:
        """Let it end."""
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def ours(folder: Path) -> Iterator[tuple[list[str], Workload, list[int]]]:
    """A nats-server; gives how to call a side, its work, and the bus's processes."""
    server = Server(folder / "broker")
    server.start()
    try:
        process = server.process.pid if server.process else 0
        yield [sys.executable, str(HERE / "bus_table_side.py")], Workload(str(folder)), [process]
    finally:
        server.stop()


@contextmanager
def transfer_queue(python: Path, folder: Path, log: IO[str]) -> Iterator[tuple[list[str], Workload, list[int]]]:
    """Ray, the controller and two storage units; as `ours`."""
    command = [str(python), str(HERE / "bus_tq_side.py")]
    bus = Side([*command, "bus", Workload(str(folder)).json()], log)
    try:
        yield command, Workload(bus.greeting), [p for p in tree(bus.process.pid) if p != bus.process.pid]
    finally:
        bus.close()


def cpu_seconds(process: int) -> float:
    """CPU time of a process so far; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(side: str, batches: int, python: Path, folder: Path) -> Figures:
    """One turn of a side: samples a second, latency in ms, memory in MiB."""
    with ExitStack() as stack:
        log = stack.enter_context((folder / f"{side}.log").open("w"))
        bus = ours(folder) if side == "ours" else transfer_queue(python, folder, log)
        command, work, processes = stack.enter_context(bus)
        producer = Side([*command, "put", work.json()], log)
        stack.callback(producer.close)
        consumer = Side([*command, "get", work.json()], log)
        stack.callback(consumer.close)
        number = 0

        def together(count: int) -> float:
            nonlocal number
            consumer.tell("get", number, count)
            producer.tell("put", number, count)
            number += count
            began, ended = producer.times()[0], consumer.times()[1]
            return ended - began

        together(3)
        producer.tell("put", number, batches)
        began, ended = producer.times()
        put = ended - began
        memory = sum(pss_mib(process) for process in processes)
        held = sum(path.stat().st_size for path in (folder / "store").rglob("*") if path.is_file()) / MIB
        consumer.tell("get", number, batches)
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
        "memory_limit_mib": memory + held,
        "processes": len(processes),
    }


def tq_python(folder: Path) -> Path:
    """Return the interpreter of TransferQueue's environment in `folder`, made if it is not there."""
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        for requirement in REQUIREMENTS:  # torch by itself first: pip then keeps this version of it
            subprocess.run([python, "-m", "pip", "install", "--quiet", requirement], check=True)
        done.touch()
    return python


def report(sides: dict[str, list[Figures]], console: Console) -> Figures:
    """Print the table; gives medians and ratios, above 1 where ours is better."""
    medians = {
        side: {name: statistics.median(r[name] for r in runs) for name in runs[0]} for side, runs in sides.items()
    }
    table = Table(title="medians (lowest to highest)")
    for column in ("", *sides, "ratio"):
        table.add_column(column)
    figures: Figures = {}
    for name in medians["ours"]:
        mine, theirs = medians["ours"][name], medians["tq"][name]
        less_is_better = name in LESS_IS_BETTER
        ratio = theirs / mine if less_is_better else mine / theirs
        spans = {side: [r[name] for r in runs] for side, runs in sides.items()}
        shown = (f"{medians[s][name]:,.1f} ({min(v):,.1f} to {max(v):,.1f})" for s, v in spans.items())
        table.add_row(name if less_is_better else f"{name}, samples/s", *shown, f"{ratio:.2f}")
        key = name.removesuffix("_ms").removesuffix("_mib").removesuffix("_us")
        figures |= {f"ratio_{key}": round(ratio, 3), f"ours_{name}": round(mine, 1), f"tq_{name}": round(theirs, 1)}
    console.print(table)
    return figures


def main() -> None:
    """Read the arguments, run the sides in turns, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--venv", type=Path, default=HERE.parent / ".bench" / "tq-venv")
    parser.add_argument("--tq-python", type=Path, help="use this environment, which has TransferQueue, not --venv")
    parser.add_argument("--folder", type=Path, help="where our broker and store lie; a temporary folder if not set")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    console = Console(stderr=arguments.json)
    python = arguments.tq_python or tq_python(arguments.venv)
    sides: dict[str, list[Figures]] = {"ours": [], "tq": []}
    for turn in range(arguments.repeats):
        for side, runs in sides.items():
            folder = Path(tempfile.mkdtemp(prefix="bus-", dir=arguments.folder if side == "ours" else None))
            runs.append(measure(side, arguments.batches, python, folder))
            shutil.rmtree(folder, ignore_errors=True)
        load = os.getloadavg()[0]
        console.print(f"turn {turn + 1} of {arguments.repeats} done, load average {load:.1f}", highlight=False)
    figures = report(sides, console)
    if arguments.json:
        print(json.dumps(figures | {"batches": arguments.batches, "repeats": arguments.repeats}))


if __name__ == "__main__":
    main()
