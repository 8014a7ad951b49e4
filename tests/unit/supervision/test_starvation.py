"""How long a process has waited for the processor: from the kernel's figures, and for real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from relax_actors.supervision.broker_health import Starvation
from tests.support.running import wait_until

PID = 7


class Kernel:
    """Figures of a process, as files of `/proc` show them, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 100.0

    def show(self, thread: int, waited: float, turns: int, state: str = "S") -> None:
        task = self.folder / str(PID) / "task" / str(thread)
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"123456 {int(waited * 1e9)} {turns}\n")
        (task / "stat").write_text(f"{thread} (a name) with ) in it) {state} 1 2 3\n")

    def clock(self) -> float:
        return self.now


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


@pytest.mark.parametrize(
    ("waited", "turns", "state", "expected"),
    [
        (0.0, 10, "S", 0.0),  # it sleeps until something happens
        (0.0, 10, "T", 0.0),  # it was stopped by a signal
        (0.0, 11, "R", 0.0),  # it runs all the time
        (0.0, 10, "R", 4.0),  # it has had no turn since
        (0.0, 10, "D", 4.0),  # it waits for the disk
        (1.5, 25, "S", 1.5),
        (2.5, 25, "R", 4.0),  # more than half of the time: the rest is not enough to answer anybody
    ],
)
def test_waits_follow_from_the_figures_of_the_kernel(
    kernel: Kernel, waited: float, turns: int, state: str, expected: float
) -> None:
    starvation = Starvation(kernel.folder, kernel.clock)
    kernel.show(1, 50.0, 10)
    kernel.show(2, 3.0, 99)
    assert starvation.measure(PID) == 0.0
    kernel.now += 4.0
    kernel.show(1, 50.0 + waited, turns, state)
    assert starvation.measure(PID) == pytest.approx(expected)
    assert starvation.measure(PID + 1) == 0.0
    assert starvation.measure(PID) == 0.0


@contextmanager
def spinning(cpu: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that wants one processor, always the same one, all the time."""
    script = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass\n"
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", script])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_process_that_shares_a_processor_waits_and_a_stopped_one_does_not() -> None:
    cpu = min(os.sched_getaffinity(0))
    with ExitStack() as stack:
        first, _ = (stack.enter_context(spinning(cpu)) for _ in range(2))
        starvation = Starvation()
        wait_until(lambda: starvation.measure(first.pid) > 0, "a wait for the processor")
        os.kill(first.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(first.pid) == "T", "a stopped process")
        starvation.measure(first.pid)
        assert starvation.measure(first.pid) == 0.0
