"""Runs whose cells and events a test writes, and processes of `relax console` that show them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from broker.address import Address
from broker.connection import Connection
from broker.leases import RunState
from broker.permissions import OPERATOR
from broker.process import spawn
from broker.store import Store
from broker.streams import open_bucket
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.config import load_config
from relax_actors.console.activation import Activation
from relax_actors.evaluation.records import Answer, Evaluated, Record, SetFacts, write_evaluation
from relax_actors.messages import Batch, Evaluation, Prompt, Quarantined, Weights
from relax_actors.messages.cells import SetResult, Shard
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.streams import ensure_run_streams
from tests.support.embedded import Embedded
from tests.support.running import TINY, processes_of, wait_until

ROWS = 2
TOKENS = np.arange(4, dtype=np.int32)


class WrittenRun:
    """A run without processes, on a broker like that of `relax up`.

    Args:
        cwd: working directory that holds `runs/`.
        name: name of the run.
        steps: its steps.
    """

    def __init__(self, cwd: Path, name: str = "seen", steps: int = 100) -> None:
        folder = cwd / "runs" / name
        settings = [
            f"run.name={name}",
            f"run.folder={folder}",
            f"run.steps={steps}",
            f"trainer.prompts_per_step={ROWS}",
        ]
        self.cwd, self.name = cwd, name
        self.config = load_config(TINY, settings)
        self.folder = RunFolder(folder)
        self.subjects = Subjects(name)
        self._lock = self.folder.lock()
        self.folder.save_config(self.config, "")
        self._server = Embedded(self.folder.broker, self.config)
        self.connect()
        self.table.put(self.subjects.numbered("weights", 0), Weights(0, "f0", [], 1))

    def connect(self) -> None:
        """Start the broker, and connect to it; the folder is locked, as by `relax up`."""
        if self._lock.closed:
            self._lock = self.folder.lock()
        self._server.start()
        address = Address.load(self.folder.broker / "address.json")
        address.save(self.folder.address)
        self.connection = Connection(address.for_user(OPERATOR), "test")
        self.connection.call(ensure_run_streams(self.connection, self.config), 60)
        self.table = Table(self.connection, self.subjects, Store(self.folder.root / "store"), "test.0#1")
        self.trainer = self.journal("trainer")

    def journal(self, role: str, n: int = 0) -> Journal:
        """Return the journal of an actor."""
        return Journal(self.connection, self.subjects, role, n)

    def train(self, steps: range, reward: float = 0.5) -> None:
        """Write the rows, batches, versions and figures of steps."""
        subjects, cells = self.subjects, []
        for step in steps:
            for index in range(ROWS):
                prompt = Prompt(text="3+4=", tokens=TOKENS, answer="7", metadata={}, seed=1, min_version=step)
                cells.append((subjects.cell(RowId(step, index), "prompt"), prompt))
            batch = Batch(list(range(ROWS)), 1, 1, reward, 0, 8, 1e9 + step)
            cells.append((subjects.numbered("batch", step), batch))
            shard = Shard(f"weights/{step + 1}", 1000, "0" * 32)
            cells.append((subjects.numbered("weights", step + 1), Weights(step + 1, f"f{step + 1}", [shard], 1)))
            self.trainer.metric(
                {"kind": "step", "step": step, "reward": reward + step / 1000, "loss": 1.0 / (step + 1)}
            )
        self.table.put_all(cells)
        assert self.trainer.flush(60)

    def evaluate(self, version: int, texts: list[str]) -> None:
        """Write the answers of a version to one held-out prompt, and its result."""
        answers = [Answer(text, 0.5, 4, "stop") for text in texts]
        record = Record(f"eval.{version}.0", "eval", "", texts[0], "7", answers)
        head = Evaluated(self.name, version, f"f{version}", {"eval": SetFacts(samples=len(texts))})
        write_evaluation(self.folder.evaluation(version), head, [record])
        result = Evaluation(version, 0.5, 1, {"eval": SetResult(1, 0.5, 0.0)})
        self.table.put(self.subjects.numbered("evaluation", version), result)
        evaluator = self.journal("evaluator")
        evaluator.event("evaluated", version=version, reward=0.5)
        assert evaluator.flush(10)

    def quarantine(self, row: RowId, error: str, trace: str, role: str = "reward") -> None:
        """Write a quarantined row."""
        self.table.put(self.subjects.cell(row, "quarantined"), Quarantined(role, 3, error, trace))

    def lease(self, role: str, n: int, **state: Any) -> None:
        """Renew a lease, which a console hears once it is connected."""
        own = RunState(self.connection, self.connection.call(open_bucket(self.connection, self.subjects), 10))
        self.connection.call(own.renew_lease(role, n, {"pid": 1, "since": time.time(), **state}, 60), 10)

    def node(self, number: int = 0, *actors: str, **more: Any) -> None:
        """Renew the lease of a node with ready actors, as its supervisor does; `more` are further fields."""
        children = {actor: {"phase": "ready", "since": time.time(), "restarts": 0, "pid": 1} for actor in actors}
        self.lease("node", number, name="host", where="1", children=children, **more)

    def broker(self) -> subprocess.Popen[bytes]:
        """Return the process of the broker."""
        assert self._server.server.process is not None
        return self._server.server.process

    def restart_broker(self) -> None:
        """Start a broker that was killed; it has the same address."""
        self._server.start()

    def stop(self) -> None:
        """End the broker."""
        self.connection.close()
        self._server.stop()
        self._lock.close()


UNREAD = (
    "-c",
    "from relax_actors.cli import main; from relax_actors.console import run; run.PAUSE_SECONDS = 3600; main.run()",
)
"""Program of a console that reads what its first view does not need when a view asks for it, and not before."""


class ServedConsole:
    """A process of `relax console`; `program` are the arguments of Python for `relax`."""

    def __init__(
        self, run: WrittenRun | str, cwd: Path, *options: str, program: Sequence[str] = ("-m", "relax_actors.cli.main")
    ) -> None:
        self.name = run if isinstance(run, str) else run.name
        self.cwd, self._options, self._program = cwd, options, program
        self.start()

    def start(self) -> None:
        """Start the process, and wait for its link."""
        shown = [] if "--demo" in self._options else [self.name]
        command = [sys.executable, *self._program, "console", *shown, "--no-open", *self._options]
        output, log = os.pipe()
        try:
            self.process = spawn(command, cwd=self.cwd, log=log)  # ends with this process, however that ends
        finally:
            os.close(log)
        self._output = os.fdopen(output)
        line = self._output.readline()
        self.shown = time.monotonic()
        match = re.fullmatch(rf"console of run {self.name}: (http://127\.0\.0\.1:(\d+))/#token=(\S+)\n", line)
        assert match, line + (self._output.read() if self.process.poll() is not None else "")
        self.link, self.url, self.token = line.partition(": ")[2].strip(), match[1], match[3]
        wait_until(self.answers, "console")

    def answers(self) -> bool:
        """Whether the console answers."""
        try:
            return httpx.get(self.url, trust_env=False, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def get(self, path: str, **headers: str) -> Any:
        """Return an answer of the API."""
        head = {"Authorization": f"Bearer {self.token}", **headers}
        answer = httpx.get(f"{self.url}/api/{path}", headers=head, trust_env=False, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def cpu_seconds(self) -> float:
        """Return the CPU time that the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """End the process at once, and read what it wrote last."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(20)
        self._output.close()

    def stop(self) -> str:
        """End the process in order; return what it wrote."""
        if self._output.closed:
            return ""
        self.process.terminate()
        self.process.wait(30)
        with self._output:
            return self._output.read()


class LinkedConsole:
    """The console of `relax up`: its socket stays open when its process is killed."""

    def __init__(self, run: WrittenRun) -> None:
        self._folder = run.folder
        self._activation = Activation(run.folder)
        link = self._activation.link
        self.link, self.url, self.token = link.url(), link.url().partition("/#")[0], link.observer
        self._activation.start()

    def processes(self) -> list[int]:
        """Return the processes of the console."""
        return processes_of(self._folder.root, "--listen-fd")

    def kill(self) -> None:
        """End the process at once; the next request starts it again."""
        (pid,) = self.processes()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in self.processes(), "the end of the console")

    def stop(self) -> None:
        """End the console."""
        self._activation.close()


@contextmanager
def log_of(url: str, token: str, after: int | None, run: str = "") -> Iterator[Iterator[tuple[int, dict[str, Any]]]]:
    """Open the stream of a log; yield its messages with their sequences."""
    head = {"Authorization": f"Bearer {token}"} | ({} if after is None else {"Last-Event-ID": str(after)})
    path = f"{url}/api/log" + (f"?run={run}" if run else "")
    with httpx.Client(trust_env=False, timeout=30) as client, client.stream("GET", path, headers=head) as answer:
        assert answer.status_code == 200, answer.read()
        yield _messages(answer.iter_lines())


def _messages(lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    event: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            event[name] = value
        else:
            if event.get("event") == "log":
                yield int(event["id"]), json.loads(event["data"])
            event = {}
