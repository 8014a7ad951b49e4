"""Process trees of small Python scripts, run in a thread of the test."""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from relax_actors.runtime.blackbox import Snapshot
from relax_actors.supervision.launch import Launch
from relax_actors.supervision.outcome import STATUS_FD
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.spec import Backoff, ChildSpec, Exit, Limits
from relax_actors.supervision.supervisor import GiveUp, Supervisor

PATIENCE = 20.0


HEAD = f"""\
import os, signal, sys, json
def say(**words): os.write(int(os.environ["{STATUS_FD}"]), json.dumps(words).encode() + b"\\n")
"""


READY = HEAD + "say(ready=True)\n"


WAITS = READY + "signal.pause()\n"


def python(script: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", script]


@dataclass
class Observed:
    """One event that the observer received."""

    what: str
    child: str
    pid: int = 0
    starts: int = 0
    outcome: Exit | None = None
    last: Snapshot | None = None
    report: GiveUp | None = None


class Recorder:
    """Observer that queues events for the thread of the test."""

    def __init__(self) -> None:
        self.all: list[Observed] = []
        self.queue: queue.Queue[Observed] = queue.Queue()

    def _put(self, seen: Observed) -> None:
        self.all.append(seen)
        self.queue.put(seen)

    def started(self, child: str, pid: int, starts: int) -> None:
        self._put(Observed("started", child, pid=pid, starts=starts))

    def ready(self, child: str, seconds: float) -> None:
        assert seconds >= 0
        self._put(Observed("ready", child))

    def ended(self, child: str, outcome: Exit, last: Snapshot) -> None:
        self._put(Observed("ended", child, outcome=outcome, last=last))

    def gave_up(self, pool: str, report: GiveUp) -> None:
        self._put(Observed("gave_up", pool, report=report))


@dataclass
class TreeThread:
    """Process tree in its own thread; its processes die with the thread that started them."""

    tree: ProcessTree
    recorder: Recorder
    result: list[GiveUp | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=lambda: self.result.append(self.tree.run()))
        self.thread.start()

    def until(self, what: str, child: str = "", starts: int = 0) -> Observed:
        """Wait for the next event of this kind."""
        end = time.monotonic() + PATIENCE
        while True:
            seen = self.recorder.queue.get(timeout=max(0.01, end - time.monotonic()))
            if seen.what == what and child in ("", seen.child) and seen.starts >= starts:
                return seen

    def end(self) -> GiveUp | None:
        """Wait until the tree has ended by itself; return its report."""
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        return self.result[0]

    def stop(self) -> GiveUp | None:
        if self.thread.is_alive():
            self.tree.stop()
        return self.end()

    @property
    def pids(self) -> list[int]:
        return [seen.pid for seen in self.recorder.all if seen.what == "started"]


RunTree = Callable[..., TreeThread]


def tree_of(
    children: tuple[str, ...], launch: Callable[[str], Launch], *, intensity: int = 5, **spec: Any
) -> ProcessTree:
    specs = [ChildSpec(child, **spec) for child in children]
    pool = Supervisor(specs, Limits(intensity, 60), Backoff(0.01, 0.05), random.Random(1))
    return ProcessTree({"p": pool}, launch, Recorder(), 60.0)


def running(tree: ProcessTree) -> TreeThread:
    assert isinstance(tree._observer, Recorder)
    return TreeThread(tree, tree._observer)
