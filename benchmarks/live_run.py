"""A live run of the demo for benchmarks that kill its processes: processes, new cells, and the end of every row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from nats.aio.msg import Msg
from process_memory import PROC, tree

from broker.address import Address
from broker.codec import open_envelope
from broker.connection import Connection
from broker.errors import BrokerError, SubjectError
from broker.leases import RunState
from broker.ordered_consumer import OrderedConsumer
from broker.permissions import OPERATOR
from broker.store import Store
from broker.streams import ensure_bucket, wait_for_stream
from broker.subjects import CellId, Subjects
from broker.table import Table
from relax_actors.monitoring.summary import read_ledger
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.training.ledger import RowState

T = TypeVar("T")
DEMO = Path(__file__).parents[1] / "examples" / "demo" / "demo.toml"
DEADLINE = 120.0
RECORD_OVERHEAD = 30
PROGRAMS = {
    "nats-server": "broker",
    "supervision.node": "node",
    "supervision.zygote": "zygote",
    "supervision.recorder": "recorder",
    "cli.main": "root",
}


def name_of(pid: int) -> str | None:
    """Name the process of a run: a role, `broker`, `node`, `zygote` or `root`; None for other or ended processes."""
    try:
        command = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split()
    except OSError:
        return None
    # The zygote's command line also contains the actor module, which the zygote imports.
    if "relax_actors.supervision.actor_process" in command and "relax_actors.supervision.zygote" not in command:
        return command[-2]
    return next((name for part, name in PROGRAMS.items() if any(part in word for word in command)), None)


def is_alive(pid: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        return (PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(look: Callable[[], T], what: str, deadline: float = DEADLINE) -> T:
    """Poll until `look` returns a true value, and return it; exit after `deadline` seconds."""
    end = time.monotonic() + deadline
    while not (found := look()):
        if time.monotonic() > end:
            sys.exit(f"no {what} within {deadline:g} s")
        time.sleep(0.005)
    return found


@dataclass(frozen=True)
class Written:
    """A stored cell with the role and incarnation of its writer and the time (Unix seconds, the server's clock)."""

    cell: CellId
    role: str
    incarnation: int
    stored: float


@dataclass
class Seen:
    """Observations of a run."""

    last: dict[str, Written] = field(default_factory=dict)
    """Last cell of each role."""
    first: dict[tuple[str, int], Written] = field(default_factory=dict)
    """First cell of each incarnation of a role."""
    trajectories: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Stored trajectory cells of each training row: sequence and incarnation."""
    attempts: dict[tuple[int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    """Rollout incarnations that tried to write the trajectory, by training row."""
    authors: dict[tuple[int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    """Authors that tried to write the trajectory, by training row: `<role>.<n>#<incarnation>`."""
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    """Tokens of the trajectory, by training row."""
    written: list[tuple[float, str]] = field(default_factory=list)
    """Time and author of each stored trajectory of a training row: `<role>.<n>#<incarnation>`."""
    ended: set[tuple[int, int]] = field(default_factory=set)
    """Training rows that were dropped or quarantined."""
    batches: list[tuple[float, int]] = field(default_factory=list)
    """Start time of each step, and the incarnation of the trainer."""
    steps: int = 0
    record: int = 0
    """Bytes of the cells that are never removed: subject, data, and the server's overhead."""
    stored: float = 0.0
    """Time of the last stored cell."""
    events: list[dict[str, object]] = field(default_factory=list)


class LiveRun:
    """One `relax up` of the demo.

    Args:
        folder: folder of the run.
        settings: `section.key=value` overrides of the demo's configuration.
    """

    def __init__(self, folder: Path, settings: list[str]) -> None:
        self.folder = RunFolder(folder)
        self.seen = Seen()
        name = folder.name
        command = [sys.executable, "-m", "relax_actors.cli.main", "up", str(DEMO), f"run.name={name}"]
        self._output = folder.parent / f"{name}.json"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, f"run.folder={folder}", "--quiet", "--json", *settings], stdout=output
            )
        try:
            self._connect(name)
        except BaseException:
            self.stop()
            raise

    def _connect(self, name: str) -> None:
        address = wait_for(self._address, "broker")
        self.connection = Connection(address, "bench")
        self.subjects = Subjects(name)
        self.table = Table(self.connection, self.subjects, Store(self.folder.root / "store"), "bench")
        self.connection.call(wait_for_stream(self.connection, self.subjects.table_stream, 60), 61)
        self.state = RunState(self.connection, self.connection.call(ensure_bucket(self.connection, self.subjects), 30))
        self.connection.call(self._subscribe(), 10)
        self._following = [self.connection.submit(self._follow_cells()), self.connection.submit(self._follow_events())]

    def _address(self) -> Address | None:
        try:
            address = Address.load(self.folder.address).for_user(OPERATOR)
            Connection(address, "probe", 1.0).close()
        except BrokerError:
            return None
        return address

    async def _subscribe(self) -> None:
        """Receive every attempt to write a trajectory, including refused ones."""

        async def take(message: Msg) -> None:
            cell, envelope = self.subjects.parse(message.subject), open_envelope(message.data)
            author = envelope.author
            self.seen.tokens[cell.step, cell.index] = int(envelope.fields["token_ids"].shape[0])
            self.seen.attempts[cell.step, cell.index].add(int(author.rpartition("#")[2]))
            self.seen.authors[cell.step, cell.index].add(author)

        await self.connection.nc.subscribe(self.subjects.column("trajectory"), cb=take)

    async def _follow_cells(self) -> None:
        follower = OrderedConsumer(self.connection, self.subjects.table_stream, [f"{self.subjects.prefix}.>"])
        async for batch in follower.batches():
            for message in batch:
                self._take(message)

    def _take(self, message: Msg) -> None:
        try:
            cell = self.subjects.parse(message.subject)
        except SubjectError:
            return
        seen, known = self.seen, message.metadata
        author = open_envelope(message.data).author
        actor, _, incarnation = author.partition("#")
        written = Written(cell, actor.rpartition(".")[0], int(incarnation or 0), known.timestamp.timestamp())
        seen.last[written.role] = written
        seen.first.setdefault((written.role, written.incarnation), written)
        seen.stored = written.stored
        row = cell.step, cell.index
        if not cell.field:
            seen.record += len(message.subject) + len(message.data) + RECORD_OVERHEAD
        if cell.kind == "group" and cell.field == "trajectory" and known.sequence is not None:
            seen.trajectories[row].append((known.sequence.stream, written.incarnation))
            seen.written.append((written.stored, author))
        elif cell.kind == "group" and cell.field in ("dropped", "quarantined"):
            seen.ended.add(row)
        elif cell.kind == "batch":
            seen.batches.append((written.stored, written.incarnation))
            seen.steps = max(seen.steps, cell.step + 1)

    async def _follow_events(self) -> None:
        follower = OrderedConsumer(self.connection, self.subjects.log_stream, [self.subjects.event("*", "*", "*")])
        async for batch in follower.batches():
            self.seen.events += [json.loads(message.data) for message in batch]

    def pids(self) -> dict[str, list[int]]:
        """Process ids of the run, by name."""
        found: dict[str, list[int]] = defaultdict(list)
        for pid in tree(self.process.pid):
            if (name := name_of(pid)) is not None and is_alive(pid):
                found[name].append(pid)
        return found

    def check(self) -> None:
        """Exit if the run or one of its followers has ended."""
        for future in self._following:
            if future.done():
                future.result()
        if (code := self.process.poll()) is not None:
            sys.exit(f"the run ended with exit code {code}; its logs are in {self.folder.root / 'logs'}")

    def wait_for_steps(self, steps: int, deadline: float = DEADLINE) -> None:
        """Wait until `steps` steps have started."""

        def look() -> bool:
            self.check()
            return self.seen.steps >= steps

        wait_for(look, f"step {steps}", deadline)

    def kill(self, name: str) -> float:
        """SIGKILL a process of the run, wait for its end, and return the time of the signal (Unix seconds)."""
        pid = wait_for(lambda: self.pids().get(name), f"process of {name}")[0]
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(pid), f"end of {name}", 10)
        return at

    def lost(self) -> list[str]:
        """Violations: trajectories that were stored twice, or that disappeared before their rows ended."""
        ledger = read_ledger(self.table, self.folder.load_config())
        trained = {(step, index) for step, batch in ledger.batches.items() for index in batch.rows}
        present = {(cell.step, cell.index) for cell in self.table.list_cells(self.subjects.column("trajectory"))}
        known, found = trained | present | self.seen.ended, list(ledger.violations())

        async def snapshot() -> list[tuple[tuple[int, int], list[tuple[int, int]]]]:
            # Copied in the follower's thread, which adds to the dict.
            return list(self.seen.trajectories.items())

        for row, cells in self.connection.call(snapshot(), 10):
            if row not in known:
                found.append(f"trajectory of group.{row[0]}.{row[1]} is gone")
            if len({sequence for sequence, _ in cells}) > 1:
                found.append(f"trajectory of group.{row[0]}.{row[1]} was stored twice")
        return found

    def account(self) -> dict[str, int]:
        """Number of rows by their state."""
        account = read_ledger(self.table, self.folder.load_config()).account()
        names = ("admitted", *(state.value for state in RowState))
        return {name: int(getattr(account, name)) for name in names}

    def complete(self, deadline: float = DEADLINE) -> dict[str, Any]:
        """Wait for the end of the run, which must be a success, and return its result."""
        code = self.process.wait(deadline)
        if code:
            sys.exit(f"the run ended with exit code {code}; its logs are in {self.folder.root / 'logs'}")
        result: dict[str, Any] = json.loads(self._output.read_text().splitlines()[-1])
        return result

    def stop(self) -> None:
        """Stop the run in order."""
        if hasattr(self, "connection"):
            for future in getattr(self, "_following", []):
                future.cancel()
            self.connection.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
