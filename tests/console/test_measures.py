"""Bounds of the console's cost, and that clients which come and go leave nothing behind."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.console.measure import LONG, RATE, burst, long_run, opening
from tests.support.browsers import needs_browser
from tests.support.consoles import ServedConsole, WrittenRun, log_of

pytestmark = pytest.mark.slow
RECONNECTS = 360
"""An hour of a browser that loses its connection every ten seconds."""
MAX_UNITS = 8
"""Largest cost of opening a long run, in units of work: 3.5 to 4.8 were measured."""


def unit_of_work() -> float:
    """CPU seconds of JSON written and read in a loop: half as many on a core that is twice as fast."""
    began = time.process_time()
    for number in range(20_000):
        json.loads(json.dumps({f"figure{place}": number / (place + 1) for place in range(20)}))
    return time.process_time() - began


@pytest.fixture
def console(written: WrittenRun) -> Iterator[ServedConsole]:
    console = ServedConsole(written, written.cwd)
    yield console
    console.stop()


@needs_browser
def test_hundred_events_a_second_cost_little(browser: Any, written: WrittenRun) -> None:
    seconds = 8.0
    cost = burst(browser, written, seconds)
    # CPU seconds, which other processes of the machine hardly change.
    assert cost.console < 0.1 * max(seconds, cost.seconds), f"{cost} for {RATE} events a second"


@needs_browser
def test_long_run_opens_soon(browser: Any, tmp_path: Path) -> None:
    run = long_run(tmp_path)
    try:
        found = opening(browser, run)
    finally:
        run.stop()
    # CPU seconds, which bound the time on a free core; `python -m tests.console.measure` measures by the clock.
    unit = unit_of_work()
    assert found.console + found.renderer < MAX_UNITS * unit, f"{found} for {LONG} steps; a unit takes {unit:.2f} s"


def test_client_that_reconnects_for_an_hour_misses_nothing(written: WrittenRun, console: ServedConsole) -> None:
    seen: list[int] = []
    open_files: list[int] = []
    for n in range(RECONNECTS):
        written.trainer.metric({"rows": n})
        with log_of(console.url, console.token, seen[-1] if seen else 0) as messages:
            seen.append(next(messages)[0])
        if n in (RECONNECTS // 10, RECONNECTS - 1):
            open_files.append(len(list(Path(f"/proc/{console.process.pid}/fd").iterdir())))
    assert seen == list(range(1, RECONNECTS + 1))
    early, late = open_files
    assert late <= early + 8, "connections that are gone keep files open"


def test_two_consoles_of_a_run_tell_the_same_and_outlive_each_other(
    written: WrittenRun, console: ServedConsole
) -> None:
    other = ServedConsole(written, written.cwd, "--port", "0")
    written.train(range(3))
    answers = ("run", "ledger", "weights", "curves?names=step/reward", "events")
    assert other.url != console.url
    assert [other.get(name) for name in answers] == [console.get(name) for name in answers]
    with log_of(console.url, console.token, 0) as one, log_of(other.url, other.token, 0) as two:
        assert [next(one)[0] for _ in range(3)] == [next(two)[0] for _ in range(3)] == [1, 2, 3]
        console.kill()
        written.train(range(3, 4))
        assert next(two)[0] == 4
    assert other.get("run")["step"] == 4
    other.stop()
