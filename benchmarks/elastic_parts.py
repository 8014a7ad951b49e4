"""Parts of `elastic.py`: what is measured in each of them, spot engines that vanish, and an external engine."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from live_run import DEADLINE, LiveRun, wait_for
from process_memory import tree

from broker.address import Address
from broker.permissions import OPERATOR
from relax_actors.engines.protocols.server import ServerRecord
from relax_actors.messages.operations import OperationRequest
from relax_actors.operations import Operation, OperationLog, State
from relax_actors.operations.engines import save_key
from relax_actors.operations.plan import SPAN
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.node import actor_environment

STATES = (State.CREATING, State.CONNECTING, State.HEALTH_CHECKING, State.WEIGHT_SYNCING, State.READY, State.ACTIVE)
SERVER_SECONDS = 900.0
MEAN_LIFE, SHORTEST_LIFE = 30.0, 3.0
"""Seconds for which a spot node lives on average, and for which it lives at least on average."""
NOTICED, GRACE = 1 / 3, 8.0
"""Share of the spot nodes that get SIGTERM, the notice of a cloud, and the seconds that they then have to leave; the
others are killed."""
EARLY = 0.25
"""Share of the spot nodes whose life counts from their start, so that they may vanish before their first row; that of
all others counts from their first row."""


@dataclass
class Part:
    """Figures of one part.

    Attributes:
        run: the run, as it was observed.
        marks: begin of each phase (Unix seconds), with its name.
        first_row: seconds from the request to each state of the slowest new rollout, and to its first row.
        facts: further figures by name.
    """

    run: LiveRun
    marks: list[tuple[float, str]] = field(default_factory=list)
    first_row: dict[str, float] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """Begin a phase."""
        self.marks.append((time.time(), name))

    def stay(self, name: str, seconds: float) -> None:
        """Spend a phase without changes."""
        self.mark(name)
        end = time.time() + seconds
        while time.time() < end:
            self.run.check()
            time.sleep(min(0.2, seconds))

    def close(self) -> dict[str, object]:
        """End the last phase, and return the figures."""
        self.mark("")
        spans = zip(self.marks, self.marks[1:], strict=False)
        return {
            "seconds_to_first_row": self.first_row,
            "rows_lost": len(self.run.lost()),
            "tokens_twice": tokens_twice(self.run),
            "rows_per_second": {name: rows_per_second(self.run, at, end) for (at, name), (end, _) in spans},
            **self.facts,
        }


def rows_per_second(run: LiveRun, began: float, ended: float) -> float:
    """Rows that were generated between two times."""
    count = sum(began <= stored < ended for stored, _ in list(run.seen.written))
    return round(count / max(ended - began, 1e-6), 2)


def rows_of(run: LiveRun, author: str) -> list[float]:
    """Times at which authors whose names begin so have stored a trajectory."""
    return [stored for stored, name in list(run.seen.written) if name.startswith(author)]


def tokens_twice(run: LiveRun) -> int:
    """Tokens of the rows whose trajectory more than one incarnation tried to write."""
    again = [row for row, authors in list(run.seen.authors.items()) if len(authors) > 1]
    return sum(run.seen.tokens[row] for row in again)


def ended(run: LiveRun, number: int) -> Operation:
    """Wait for the end of an operation; exit if it failed."""
    log = OperationLog(run.table)

    def end() -> Operation | None:
        run.check()
        operation = log.read().operations[number]
        return operation if operation.is_over else None

    operation = wait_for(end, f"end of operation {number}", 4 * DEADLINE)
    if operation.state not in (State.ACTIVE, State.REMOVED):
        sys.exit(f"operation {number} is {operation.state}: {operation.reason}")
    return operation


def first_row(run: LiveRun, actor: str, asked: float) -> float:
    """Wait for the first row of a new actor; return the seconds from the request to it."""

    def look() -> float:
        run.check()
        return min(rows_of(run, f"{actor}#"), default=0)

    return round(wait_for(look, f"a row of {actor}") - asked, 2)


def measured(part: Part, operation: Operation) -> None:
    """Record the time to each state of an operation that adds actors, and to the first row of the slowest of them."""
    asked = operation.times[State.PENDING]
    actors = [] if operation.plan is None else operation.plan.actors
    part.first_row |= {s.value: round(operation.times[s] - asked, 2) for s in STATES if s in operation.times}
    part.first_row["first_row"] = max(first_row(part.run, actor, asked) for actor in actors)


class SpotNode:
    """A `relax node --spot` with one rollout, which vanishes with all of its processes and comes back."""

    def __init__(self, run: LiveRun, name: str) -> None:
        self._run, self._name = run, name
        self._work = run.folder.root.parent / name
        self._started = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self.first_rows: list[float] = []
        """Seconds from each start to the first row, of the starts that lived until then."""
        self.rows = 0
        """Rows that its rollouts have generated."""
        self.leaves: list[float] = []
        """Seconds from each notice to the end of the node."""

    def start(self) -> None:
        """Join the run."""
        address = Address.load(self._run.folder.address).for_user(OPERATOR)
        keys = Path(str(address.credentials)).parent
        command = [sys.executable, "-m", "relax_actors.cli.main", "node", "--broker", address.url, "--spot"]
        command += ["--credentials", str(keys), "--store", str(self._run.folder.root / "store"), "--role", "rollout"]
        command += ["--name", self._name, "--work", str(self._work), "--grace", str(GRACE)]
        self._started = time.time()
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _number(self) -> int:
        """Return the number of the node; 0 if it has not joined yet."""
        leases = self._run.table.call(self._run.state.leases("node"))
        own = {key: lease for key, lease in leases.items() if lease.get("name") == self._name}
        return next((int(key.rpartition(".")[2]) for key, o in own.items() if o["since"] >= self._started), 0)

    def has_generated(self) -> bool:
        """Whether its rollout has generated a row since the last start."""
        number = self._number()
        return number > 0 and max(rows_of(self._run, f"rollout.{SPAN * number}#"), default=0) > self._started

    def vanish(self, *, is_noticed: bool = False) -> int:
        """Kill all processes of the node at once, or have it leave; return the rows that a killed rollout held."""
        if self._process is None:
            return 0
        number = self._number()
        if is_noticed:
            self._process.terminate()
            noticed = time.time()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(3 * GRACE)
                self.leaves.append(round(time.time() - noticed, 2))
        for pid in tree(self._process.pid) if self._process.poll() is None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        if not number:
            return 0
        n = SPAN * number
        incarnation = self._run.table.call(self._run.state.incarnations("rollout", n))
        written = rows_of(self._run, f"rollout.{n}#{incarnation}")
        # A node that vanished before its rollout had started left none of its own.
        if written and min(written) > self._started:
            self.first_rows.append(round(min(written) - self._started, 2))
            self.rows += len(written)
        return rows_in_hand(RunFolder(self._work).black_box(f"rollout.{n}"))


def rows_in_hand(path: Path) -> int:
    """Return how many rows an actor held when it was killed."""
    if not path.exists():
        return 0
    with closing(BlackBox(path)) as box:
        return len(box.read().rows)


def vanishing(run: LiveRun, nodes: int, seconds: float, quiet: float, seed: int) -> Part:
    """Let spot nodes vanish at random for a while, each of which comes back at once."""
    part, chance = Part(run), random.Random(seed)  # noqa: S311 moments of a benchmark
    part.stay("before", quiet)
    spot = [SpotNode(run, f"spot{n}") for n in range(nodes)]
    life = max(SHORTEST_LIFE, min(MEAN_LIFE, seconds / 4))
    part.mark("spot engines vanish")
    end = time.monotonic() + seconds
    due: list[float | None] = [0.0] * nodes
    vanished, held = -nodes, []
    while time.monotonic() < end:
        run.check()
        for n, node in enumerate(spot):
            now, moment = time.monotonic(), due[n]
            is_due = moment is not None and now >= moment
            if is_due:
                held.append(node.vanish(is_noticed=chance.random() < NOTICED))
                vanished += 1
                node.start()
            if (is_due and chance.random() < EARLY) or (moment is None and node.has_generated()):
                due[n] = now + life * chance.uniform(0.5, 1.5)
            elif is_due:
                due[n] = None
        time.sleep(0.1)
    held += [node.vanish() for node in spot]
    part.stay("after", quiet)
    firsts = sorted(second for node in spot for second in node.first_rows)
    part.first_row = {"first_row": firsts[len(firsts) // 2]} if firsts else {}
    returned = [event["rows"] for event in run.seen.events if event["kind"] == "rows_returned"]
    part.facts = {
        "rows_of_spot_engines": sum(node.rows for node in spot),
        "vanished": vanished + nodes,
        "vanished_with_rows": sum(map(bool, held)),
        "rows_in_hand": sum(held),
        "noticed": sum(len(node.leaves) for node in spot),
        "seconds_to_leave": max((second for node in spot for second in node.leaves), default=None),
        "rows_returned": sum(len(rows) for rows in returned if isinstance(rows, list)),
    }
    return part


@contextmanager
def server_elsewhere(run: LiveRun) -> Iterator[tuple[ServerRecord, int]]:
    """Start an SGLang server of the run's model in a folder of its own; yields its record and its process group."""
    config, folder = run.folder.load_config(), run.folder.root.parent / "elsewhere"
    config = config.model_copy(update={"run": config.run.model_copy(update={"folder": folder})})
    shutil.copytree(run.folder.root / "model-config", config.model_path)
    folder.chmod(0o700)
    own = RunFolder(folder)
    own.save_config(config, run.folder.import_path)
    command = [sys.executable, "-m", "relax_actors.supervision.inference_server", str(folder), "0"]
    environment = os.environ | actor_environment(config)
    with (folder / "server.log").open("ab") as log:
        keeper = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield wait_for(lambda: ServerRecord.load(own.server(0)), "server", SERVER_SECONDS), keeper.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()


def joining(run: LiveRun, seconds: float) -> Part:
    """Let an external engine join, generate for a while, and die."""
    part, log = Part(run), OperationLog(run.table)
    with server_elsewhere(run) as (record, group):
        part.stay("before", seconds)
        part.mark("engine joins")
        key = save_key(run.folder.root / "store", record.key)
        joined = ended(run, log.request(OperationRequest("add_engine", url=record.url, key_file=key)).id)
        measured(part, joined)
        part.stay("with it", seconds)
        died = time.time()
        part.mark("engine dies")
        os.killpg(group, signal.SIGKILL)

    def removal() -> int:
        run.check()
        return next((o.id for o in log.read().operations.values() if o.request.engine == joined.id), 0)

    gone = ended(run, wait_for(removal, "removal of the engine"))
    part.facts["seconds_to_removal"] = round(gone.times[State.REMOVED] - died, 2)
    part.stay("after", seconds)
    return part
