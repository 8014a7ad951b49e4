"""Runs of `relax up` in a process of their own, observed through their broker."""

from __future__ import annotations

import gc
import io
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog

from broker.address import Address
from broker.connection import Connection
from broker.errors import BrokerError
from broker.store import Store
from broker.subjects import Subjects
from broker.table import Table
from relax_actors.cli.main import run as run_command
from relax_actors.monitoring.connection import connected
from relax_actors.monitoring.examination import examine
from relax_actors.monitoring.summary import read_ledger
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.training.ledger import Ledger

SUPPORT = Path(__file__).parent
TINY = SUPPORT / "tiny.toml"
IMAGES = SUPPORT / "tiny_images.toml"
DEADLINE = 240.0
ON_POLICY = ("staleness.max=0", "run.deterministic=true", "supervision.intensity=50", "supervision.ack_wait=1")
"""Settings with which the weights at the end depend on nothing but the configuration."""


def wait_until(holds: Callable[[], Any], what: str, deadline: float = 60.0) -> Any:
    """Poll until `holds` returns a true value, and return the value."""
    end = time.monotonic() + deadline
    while not (value := holds()):
        assert time.monotonic() < end, f"no {what} within {deadline} s"
        time.sleep(0.01)
    return value


def wait_for_end(descriptor: int) -> None:
    """Wait for the end of a process that was killed, by its pidfd."""
    assert select.select([descriptor], [], [], DEADLINE)[0], "a process outlives SIGKILL"


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Signal a process, and wait for its end after SIGKILL: its locks are free then; return whether it was there."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, number)
            if number == signal.SIGKILL:
                wait_for_end(descriptor)
        finally:
            os.close(descriptor)
        return True
    return False


def processes_of(folder: Path, word: str = "") -> list[int]:
    """Processes whose command line names the folder of a run, and contains a word."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                command = (path / "cmdline").read_bytes()
                state = (path / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            named = str(folder).encode() in command and word.encode() in command
            if named and state != "Z" and int(path.name) != os.getpid():
                found.append(int(path.name))
    return found


def relax(*arguments: str, cwd: Path, deadline: float = 110.0) -> subprocess.CompletedProcess[str]:
    """Run the command `relax`."""
    command = [sys.executable, "-m", "relax_actors.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=deadline, check=False)


@contextmanager
def ended_after(seconds: float, what: str) -> Iterator[None]:
    """Fail in the middle of the block if it takes longer; for the main thread."""
    left, began = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()
    seconds = min(seconds, left or seconds)  # the limit of the whole test, 0 without one

    def fail(*_: object) -> None:
        pytest.fail(f"{what} has not ended after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left and max(0.001, left - (time.monotonic() - began)))
        signal.signal(signal.SIGALRM, before)


def relax_here(*arguments: str, cwd: Path, deadline: float = 110.0) -> subprocess.CompletedProcess[str]:
    """Call the command `relax` in this process: its output and exit code, without the seconds of its imports."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv, path, threshold, logging = sys.argv, sys.path.copy(), gc.get_threshold(), structlog.get_config()
    sys.argv = ["relax", *arguments]
    try:
        with chdir(cwd), redirect_stdout(out), redirect_stderr(err), ended_after(deadline, f"relax {arguments[0]}"):
            run_command()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv, sys.path[:] = argv, path
        gc.set_threshold(*threshold)
        structlog.configure(**logging)
    return subprocess.CompletedProcess(["relax", *arguments], code, out.getvalue(), err.getvalue())


def settings_of(address: Address) -> list[str]:
    """Settings with which a run uses a broker that it does not start; its roles share one user."""
    assert address.credentials is not None
    return [f"broker.url={address.url}", f"broker.credentials={Path(address.credentials).parent}"]


@dataclass
class Run:
    """A run of `relax up`; start it again to resume."""

    cwd: Path
    name: str
    settings: list[str] = field(default_factory=list)
    config: Path = TINY
    process: subprocess.Popen[str] | None = None
    at: Path | None = None
    """Folder of the run, if not the default."""
    _connection: Connection | None = None

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.at or self.cwd / "runs" / self.name)

    def start(self, *more: str) -> Run:
        command = [sys.executable, "-m", "relax_actors.cli.main", "up", str(self.config), f"run.name={self.name}"]
        command += [*self.settings, *more, "--json", "--quiet"]
        self.process = subprocess.Popen(
            command, cwd=self.cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        return self

    def finish(self, deadline: float = DEADLINE) -> tuple[int, dict[str, Any], str]:
        """Wait for the end; return the exit code, the JSON of the last line, and the output."""
        assert self.process is not None
        try:
            out, err = self.process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            out, err = self._terminate()
            logs = "\n".join(f"== {p.name}\n{p.read_text()[-1500:]}" for p in (self.folder.root / "logs").glob("*"))
            raise AssertionError(f"the run was not over within {deadline} s\n{out}\n{err}\n{logs}") from None
        lines = out.strip().splitlines()
        result = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
        return self.process.returncode, result, out + err

    def _terminate(self) -> tuple[str, str]:
        """Stop `relax up`, or kill it if it does not stop soon; return the rest of its output."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.communicate()

    def end_in_order(self) -> None:
        """Stop the run, and check that its ledger is complete."""
        self.disconnect()
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.finish()[0] == 0
        found = relax("ledger", str(self.folder.root), cwd=self.cwd)
        assert found.returncode == 0, found.stdout + found.stderr
        assert "the ledger is complete" in found.stdout

    def complete(self, deadline: float = DEADLINE) -> dict[str, Any]:
        """Start the run, wait for its successful end, and return the result."""
        code, result, said = self.start().finish(deadline)
        assert code == 0, said
        return result

    def complete_healthy(self, deadline: float = DEADLINE) -> dict[str, Any]:
        """Complete the run, which nothing disturbs, and check that `relax doctor` finds no problem in it."""
        result = self.complete(deadline)
        with connected(str(self.folder.root)) as at:
            assert [finding for finding in examine(at) if finding.is_problem] == []
        return result

    @property
    def connection(self) -> Connection:
        """A connection to the broker of the live run."""
        if self._connection is None:
            wait_until(self.folder.address.exists, "broker.json")

            def connect() -> Connection | None:
                try:
                    return Connection(Address.load(self.folder.address).for_user("operator"), "test", deadline=2.0)
                except BrokerError:
                    return None

            self._connection = wait_until(connect, "broker")
        return self._connection

    @property
    def table(self) -> Table:
        return Table(self.connection, Subjects(self.name), Store(self.folder.root / "store"), "test")

    def ledger(self) -> Ledger:
        return read_ledger(self.table, self.folder.load_config())

    def disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def pid_of(self, actor: str) -> int | None:
        """Process of an actor, by its command line; None during a restart."""
        role, n = actor.rsplit(".", 1)
        for pid in processes_of(self.folder.root):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
            if command.endswith(f"supervision.actor_process {self.folder.root} {role} {n}"):
                return pid
        return None

    def kill(self, actor: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal an actor as soon as it has a process; see `strike`."""
        return self.strike(lambda: self.pid_of(actor), actor, number)

    def strike(self, find: Callable[[], int | None], what: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal a process of the run as soon as `find` returns its id; return the id.

        After SIGKILL the process has ended: a second kill of the same actor hits its next incarnation. A run that ends
        before fails the test.
        """

        def signalled() -> int | None:
            if (pid := find()) is None:
                assert self.is_up, f"the run ended before {what} had a process; give it more steps"
                return None
            return pid if kill(pid, number) else None

        pid: int = wait_until(signalled, f"process of {what}")
        return pid

    @property
    def is_up(self) -> bool:
        """Whether `relax up` has not ended; true of a run that a test observes, and has not started."""
        return self.process is None or self.process.poll() is None

    def stop(self) -> None:
        """Stop whatever still runs, at the end of a test."""
        self.disconnect()
        if self.process is None:
            return
        if self.process.poll() is None:
            self._terminate()
        # A test that failed has not read them to their end.
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def trained_weights(run: Run) -> str:
    """Complete a run of the tiny configuration, and return the fingerprint of its weights."""
    result = run.complete()
    assert (result["admitted"], result["trained"]) == (32, 32)
    return str(result["weights_fingerprint"])
