"""Measure one broker with 10, 100 and 1,000 rollout actors on the same rows.

The actors are real: the role `rollout` with a simulated engine that takes a microsecond, each with its own pump, thread
and connection; `--processes` processes hold all of them, so that no single interpreter is the limit. Rows are admitted
as fast as they can be written; the time is taken from the first row to the last trajectory. CPU and memory (resident
set) of the broker are those of nats-server. Repeats are interleaved; the table shows medians.

    python benchmarks/scale.py [--actors 10 100 1000] [--rows 10000] [--processes 8] [--repeats 3] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import xxhash

from broker.address import Address
from broker.connection import Connection
from broker.leases import RunState
from broker.permissions import OPERATOR
from broker.server import Server
from broker.store import Store
from broker.streams import ensure_bucket
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.config import Config, validate
from relax_actors.config.simulate import DEFAULTS
from relax_actors.data.model_folder import prepare
from relax_actors.messages import Prompt, Shard, Weights
from relax_actors.roles.rollout import Rollout
from relax_actors.runtime import Context, logs
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.pool_pump import PoolPump
from relax_actors.runtime.role_actor import RoleActor, Setup
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.runtime.watchdog import Watchdog
from relax_actors.supervision.streams import ensure_run_streams

TICKS = os.sysconf("SC_CLK_TCK")
DEADLINE = 300.0
GOAL = 1.2
"""Most broker CPU per row, relative to the first number of actors."""


class LoopConnection(Connection):
    """A separate connection in an event loop shared with other actors."""

    def __init__(self, address: Address, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.address, self.loop, self.on_reconnect = address, loop, []
        self.on_wait = lambda: None
        self._name, self._closing, self._options = name, False, address.connect_options()
        self._refused_at, self._refusal, self._signing_in_since = float("-inf"), "", None

    async def connect(self) -> None:
        """Connect."""
        await self._connect(60.0)


def config_of(folder: Path) -> Config:
    """Configuration of a run whose rows take no time."""
    # Not 0: a simulated row of 0 seconds has no tokens, and its trajectory would be rejected.
    generation = {"row": 1e-6}
    simulate = {"devices": 2, "rollout_devices": 1, "generation": generation, "training": {"step": 0.0}}
    body = {**DEFAULTS, "run": {"name": "scale", "folder": str(folder)}, "simulate": simulate}
    return validate(body, "benchmark")


async def run_actor(config: Config, connection: LoopConnection, n: int) -> None:
    """Run one actor until the process ends."""
    await connection.connect()
    subjects, folder = Subjects("scale"), RunFolder(config.folder)
    table = Table(connection, subjects, Store(config.store_path), f"rollout.{n}#1")
    state = RunState(connection, await ensure_bucket(connection, subjects))
    role = Rollout()
    role.context = Context(config, folder, "rollout", n, 1, table, state, Journal(connection, subjects, "rollout", n))
    watch = Watchdog(role.context, BlackBox(folder.black_box(f"rollout.{n}")), DEADLINE, print)
    role.context.fail = lambda error: os._exit(print(error) or 1)
    actor = RoleActor.start(role, watch)
    await actor.ask(Setup(), block=False)
    await PoolPump(role, actor, watch).run(asyncio.Event())


def run_actors(folder: Path, numbers: range) -> None:
    """Run actors in this process until its input is closed."""
    logs.configure(logging.ERROR)
    threading.stack_size(256 << 10)
    config, address = config_of(folder), Address.load(folder / "broker" / "address.json").for_user(OPERATOR)
    loop = asyncio.new_event_loop()

    async def run_all() -> None:
        await asyncio.gather(*(run_actor(config, LoopConnection(address, f"rollout.{n}", loop), n) for n in numbers))

    threading.Thread(target=loop.run_until_complete, args=(run_all(),), daemon=True).start()
    sys.stdin.read()
    os._exit(0)


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


class Testbed:
    """A broker, and a table with weights to which rows are admitted."""

    def __init__(self, folder: Path) -> None:
        self.config = config_of(folder)
        prepare(self.config, self.config.model_path)
        RunFolder(folder).black_box("x").parent.mkdir(parents=True, exist_ok=True)
        self.server = Server(folder / "broker")
        address = self.server.start()
        self.connection = Connection(address, "bench")
        self.connection.call(ensure_run_streams(self.connection, self.config), 60)
        self.table = Table(self.connection, Subjects("scale"), Store(self.config.store_path), "bench.0#1")
        self.table.store.write("weights/0.safetensors", lambda path: path.write_bytes(b"weights"))
        fingerprint = xxhash.xxh3_128_hexdigest(b"weights")
        shard = Shard("weights/0.safetensors", 7, fingerprint)
        self.table.put(self.table.subjects.numbered("weights", 0), Weights(0, fingerprint, [shard], 1))

    def admit(self, rows: int) -> None:
        """Write the prompts of one step of `rows` rows."""
        tokens = np.array([0, 2], np.int32)
        for begin in range(0, rows, 512):
            self.table.put_all(
                (self.table.subject(RowId(0, i), "prompt"), Prompt("0>", tokens, "1", {}, i, 0))
                for i in range(begin, min(begin + 512, rows))
            )

    def wait(self, what: str, holds: object) -> None:
        """Wait until `holds()` is true; exit after the deadline."""
        end = time.monotonic() + DEADLINE
        while not holds():  # type: ignore[operator]
            if time.monotonic() > end:
                sys.exit(f"no {what} within {DEADLINE:g} s")
            time.sleep(0.05)

    def consumer(self) -> tuple[int, int]:
        """Waiting requests of the actors' consumer, and rows that are not finished."""
        try:
            info = self.connection.call(
                self.connection.js.consumer_info(self.table.subjects.table_stream, "rollout"), 10
            )
        except Exception:  # noqa: BLE001 the first actor has not created it yet
            return 0, -1
        return info.num_waiting or 0, (info.num_pending or 0) + (info.num_ack_pending or 0)

    def close(self) -> None:
        """Stop the broker."""
        self.connection.close()
        self.server.stop()


def measure(actors: int, rows: int, processes: int) -> dict[str, float]:
    """Measure once, on a new broker."""
    with tempfile.TemporaryDirectory() as scratch:
        testbed = Testbed(Path(scratch))
        share = -(-actors // processes)
        bounds = [(n, min(n + share, actors)) for n in range(0, actors, share)]
        command = [sys.executable, __file__, "--work", scratch]
        workers = [subprocess.Popen([*command, str(a), str(b)], stdin=subprocess.PIPE) for a, b in bounds]
        try:
            testbed.wait(f"{actors} actors", lambda: testbed.consumer()[0] >= actors)
            pid = testbed.server.process.pid if testbed.server.process else 0
            began, cpu = time.monotonic(), cpu_seconds(pid)
            own = sum(cpu_seconds(w.pid) for w in workers)
            testbed.admit(rows)
            testbed.wait("end", lambda: testbed.consumer()[1] == 0)
            seconds, cpu = time.monotonic() - began, cpu_seconds(pid) - cpu
            own = sum(cpu_seconds(w.pid) for w in workers) - own
            done = testbed.table.count_cells(testbed.table.subjects.column("trajectory"))
            if done != rows:
                sys.exit(f"{done} of {rows} rows have a trajectory")
            return {
                "actors": actors,
                "rows_per_second": rows / seconds,
                "broker_ms_per_row": 1000 * cpu / rows,
                "broker_cores": cpu / seconds,
                "actors_ms_per_row": 1000 * own / rows,
                "broker_mib": resident_mib(pid),
            }
        finally:
            for worker in workers:
                worker.communicate()
            testbed.close()


def main() -> None:
    """Print the table; exit code 1 if the broker's CPU per row grows beyond the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--rows", type=int, default=10000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        folder, first, last = options.work
        run_actors(Path(folder), range(int(first), int(last)))
    logs.configure(logging.ERROR)
    found: dict[int, list[dict[str, float]]] = {actors: [] for actors in options.actors}
    for _ in range(options.repeats):
        for actors in options.actors:
            found[actors].append(measure(actors, options.rows, options.processes))
    medians = [{key: statistics.median(one[key] for one in many) for key in many[0]} for many in found.values()]
    print("actors    rows/s  broker ms/row  broker cores  actors ms/row  broker MiB")
    for one in medians:
        print(
            f"{one['actors']:6.0f} {one['rows_per_second']:9.0f} {one['broker_ms_per_row']:14.3f} "
            f"{one['broker_cores']:13.2f} {one['actors_ms_per_row']:14.2f} {one['broker_mib']:11.1f}"
        )
    growth = max(one["broker_ms_per_row"] for one in medians) / medians[0]["broker_ms_per_row"]
    print(f"broker CPU per row: at most {growth:.2f} times that of {medians[0]['actors']:.0f} actors (goal: {GOAL})")
    if options.json:
        print(json.dumps({"medians": medians, "growth": growth, "repeats": found}))
    sys.exit(0 if growth <= GOAL else 1)


if __name__ == "__main__":
    main()
