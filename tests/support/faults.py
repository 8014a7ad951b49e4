"""Real faults on a run, and the records of a run, live or after its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from broker.address import Address
from broker.codec import open_envelope
from broker.ordered_consumer import OrderedConsumer
from broker.subjects import CellId
from broker.table import Table
from relax_actors.errors import RelaxError
from relax_actors.messages import Batch, Checkpoint
from relax_actors.monitoring.connection import connected
from relax_actors.runtime.blackbox import BlackBox, Snapshot
from relax_actors.supervision.node import actor_environment
from tests.support.running import Run, processes_of, wait_for_end, wait_until

_SUPERVISORS = {
    "node": "supervision.node ",
    "broker": "nats-server -c ",
    "recorder": "supervision.recorder ",
    "zygote": "supervision.zygote ",
}


def command_of(pid: int) -> str:
    """Command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def process(run: Run, target: str) -> int | None:
    """Process of an actor (`trainer.0`), the `node`, the `zygote` or the embedded `broker`; None during a restart.

    `far/trainer.0` and `far/node` are those of the node `far` that joined; see `tests.support.nodes`.
    """
    place, _, target = target.rpartition("/")
    if place:
        run = replace(run, at=run.cwd / f"node-{place}")
    if target not in _SUPERVISORS:
        return run.pid_of(target)
    # A child starts as a launcher, whose command line contains the command too.
    found = [
        pid
        for pid in processes_of(run.folder.root)
        if _SUPERVISORS[target] in command_of(pid) and " -I -S -c " not in command_of(pid)
    ]
    return found[0] if found else None


def hit(run: Run, target: str, number: signal.Signals = signal.SIGKILL, other_than: int | None = None) -> int:
    """Signal a process as soon as it exists, other than `other_than`; return its id. See `Run.strike`."""

    def find() -> int | None:
        pid = process(run, target)
        return None if pid == other_than else pid

    return run.strike(find, target, number)


@contextmanager
def aimed(run: Run, target: str) -> Iterator[Callable[[], int]]:
    """Look up a process beforehand; the yielded function kills it, or its successor if it has exited."""
    with held(run, target) as aim:
        yield aim.strike


@contextmanager
def held(run: Run, target: str) -> Iterator[Aim]:
    """Look up a process beforehand, to stop it and to kill it without delay."""

    def opened() -> Aim | None:
        with suppress(ProcessLookupError):
            return None if (pid := process(run, target)) is None else Aim(run, target, pid, os.pidfd_open(pid))
        return None

    aim: Aim = wait_until(opened, f"process of {target}", 60)
    try:
        yield aim
    finally:
        os.close(aim.descriptor)


@dataclass(frozen=True)
class Aim:
    """A process that was looked up.

    Attributes:
        run: its run.
        target: what it is, such as "trainer.0".
        pid: its number.
        descriptor: its pidfd.
    """

    run: Run
    target: str
    pid: int
    descriptor: int

    def strike(self) -> int:
        """Kill it, or its successor if it has exited; return the number of the killed process, which has ended."""
        if not self.is_struck():
            return hit(self.run, self.target, other_than=self.pid)
        wait_for_end(self.descriptor)
        return self.pid

    def is_struck(self) -> bool:
        """Kill it; return False if it had exited."""
        try:
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def strike_while(self, is_at_it: Callable[[], bool]) -> bool:
        """Kill it if a condition holds while it is stopped; else let it go on. Return whether it was killed."""
        try:
            signal.pidfd_send_signal(self.descriptor, signal.SIGSTOP)
            met = is_at_it()
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL if met else signal.SIGCONT)
        except ProcessLookupError:
            return False
        if met:
            wait_for_end(self.descriptor)
        return met


def box(run: Run, actor: str) -> Snapshot:
    """Read the black box of an actor: its current rows, or what it waits for."""
    recorder = BlackBox(run.folder.black_box(actor))
    try:
        return recorder.read()
    finally:
        recorder.close()


def is_over(run: Run) -> bool:
    """Whether `relax up` has ended."""
    return run.process is None or not run.is_up


def wait_for_cell(run: Run, subject: str, deadline: float = 120.0) -> None:
    """Wait until a cell was written, by its subject without the run's prefix; a run that ends before fails the test."""

    def is_written() -> bool:
        assert run.is_up, f"the run ended before {subject} was seen; give it more steps"
        return has_written(run, subject)

    wait_until(is_written, subject, deadline)


def has_written(run: Run, subject: str) -> bool:
    """Whether a live run has written a cell, or is beyond its step: the cell may have been removed with it."""
    kind, step, *_ = subject.split(".")
    later = [f"weights.{int(step) + 1}"] if kind == "group" else []
    return any(run.table.get_all(f"relax.{run.name}.{name}" for name in (subject, *later)))


def log_of(table: Table, what: str) -> list[dict[str, Any]]:
    follower = OrderedConsumer(table.connection, table.subjects.log_stream, [f"{table.subjects.prefix}.{what}"])
    return [json.loads(message.data) for message in table.connection.call(follower.read_all(caught_up=False), 60)]


@dataclass(frozen=True)
class Story:
    """The records of a run in its streams."""

    cells: list[tuple[CellId, int, str, Any]]
    """Each cell with its sequence number, its author and, for numbered cells, its value."""
    events: list[dict[str, Any]]
    metrics: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind."""
        return [event for event in self.events if event["kind"] == kind]

    def steps(self) -> list[dict[str, Any]]:
        """Metrics of the trained steps, in order, of which there must be some."""
        steps = [metric for metric in self.metrics if metric.get("kind") == "step"]
        assert steps, "no step was trained"
        return steps

    def values(self, kind: str) -> dict[int, Any]:
        """Batches, weights, checkpoints or evaluations by step or version."""
        return {cell.step: value for cell, _, _, value in self.cells if cell.kind == kind}

    def fingerprints(self) -> dict[int, str]:
        """Published weights by version."""
        return {cell.step: value["fingerprint"] for cell, _, _, value in self.cells if cell.kind == "weights"}

    @property
    def floor(self) -> int:
        """The last published floor."""
        return max((c.floor for c in self.values("checkpoint").values()), default=0)

    def strays(self) -> list[str]:
        """Cells below the floor, which should be removed; quarantined cells stay for inspection."""
        return [
            f"{cell.row}.{cell.field} by {author}"
            for cell, _, author, _ in self.cells
            if cell.kind == "group" and cell.step < self.floor and cell.field != "quarantined"
        ]


NUMBERED = ("batch", "weights", "checkpoint", "evaluation")
_KINDS: dict[str, type[Batch | Checkpoint]] = {"batch": Batch, "checkpoint": Checkpoint}


def story_of(run: Run) -> Story:
    """Read the streams of a run; starts its broker for a moment if the run has ended."""
    if is_over(run):
        with connected(str(run.folder.root)) as at:
            return _story(at.table)
    return _story(run.table)


def _story(table: Table) -> Story:
    cells = []
    for cell_id, cell in table.snapshot([f"{table.subjects.prefix}.{k}.>" for k in ("group", "eval")]):
        author = open_envelope(cell.data, lambda reference: reference).author  # type: ignore[arg-type,return-value]
        cells.append((cell_id, cell.sequence, author, None))
    for cell_id, cell in table.snapshot([table.subjects.numbered(k, "*") for k in NUMBERED]):
        envelope = table.read_envelope(cell.data)
        expected = _KINDS.get(cell_id.kind)
        value = table.read(cell.data, expected) if expected else envelope.fields
        cells.append((cell_id, cell.sequence, envelope.author, value))
    cells.sort(key=lambda entry: entry[1])
    return Story(cells, log_of(table, "event.>"), log_of(table, "metric.>"))


@contextmanager
def host_by_hand(run: Run, role: str, n: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """Start an incarnation of an actor that the node does not know."""
    folder = run.folder
    command = [sys.executable, "-m", "relax_actors.supervision.actor_process", str(folder.root), role, str(n)]
    environment = os.environ | actor_environment(folder.load_config())
    with (folder.root.parent / f"{role}.{n}.by-hand.log").open("ab") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


def leftovers(run: Run, port: int) -> list[str]:
    """What is left of a killed run: processes, its port, its lock."""
    commands = {pid: command_of(pid) for pid in processes_of(run.folder.root)}
    # A node that joined goes on without `relax up`.
    found = [f"process {pid}: {command}" for pid, command in commands.items() if " node --broker " not in command]
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            found.append(f"port {port}")
    try:
        run.folder.lock().close()
    except RelaxError as error:
        found.append(str(error))
    return found


def port_of(run: Run) -> int:
    """Port of the run's broker."""
    return int(Address.load(run.folder.address).url.rsplit(":", 1)[1])


def kill_root(run: Run) -> None:
    """SIGKILL `relax up` and wait until nothing of the run is left."""
    port = port_of(run) if run.folder.address.exists() else 1
    run.disconnect()
    assert run.process is not None
    run.process.kill()
    run.process.communicate()
    left: list[str] = []

    def gone() -> bool:
        left[:] = leftovers(run, port)
        return not left

    try:
        wait_until(gone, "end of all that the run held")
    except AssertionError as error:
        raise AssertionError(f"{error}: {left}") from None


def temporary_files(run: Run) -> list[str]:
    """Half-written files below a run's folder."""
    root = run.folder.root
    return sorted(str(path.relative_to(root)) for path in root.rglob(".*.tmp"))


def wait_for_path(find: Callable[[], Path | None], what: str, deadline: float = 120.0) -> Path:
    """Poll without pauses for a path that may exist for milliseconds only."""
    end = time.monotonic() + deadline
    while (path := find()) is None:
        assert time.monotonic() < end, f"no {what} within {deadline} s"
    return path
