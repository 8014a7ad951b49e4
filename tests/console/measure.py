"""What the console costs and how soon it answers: `python -m tests.console.measure [--seconds 60]` prints figures.

CPU seconds are those of the processes, which other processes of the machine hardly change; the seconds of the clock are
for a quiet machine. The tests of `test_measures.py` check the CPU seconds, with shorter runs.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax_actors.messages import Batch, Checkpoint, Weights
from relax_actors.messages.cells import RowCounts
from tests.support.browsers import ARGUMENTS, CHROMIUM, opened
from tests.support.consoles import ROWS, ServedConsole, WrittenRun
from tests.support.recorded_runs import recorded
from tests.support.running import wait_until

RATE = 100
"""Messages a second; the journal of an actor limits its events to fewer."""
LONG = 10_000
"""Steps of a long run."""
CHUNK = 2_000
PATIENCE_MS = 180_000


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of a burst of messages, and how long it took in seconds."""

    console: float
    renderer: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Opening:
    """Opening the page of a run.

    Attributes:
        console: CPU seconds of the console, its start included.
        renderer: CPU seconds of the processes that draw pages.
        seconds: from the link that the console prints until the newest step and the curves are shown.
    """

    console: float
    renderer: float
    seconds: float


def burst(browser: Any, run: WrittenRun, seconds: float) -> Cost:
    """Publish `RATE` messages a second while a page shows the run."""
    run.train(range(4))
    console = ServedConsole(run, run.cwd)
    try:
        watched = opened(browser, console)
        watched.follow_log()
        page, reporter = watched.page, run.journal("rollout")
        reporter.metric({"rows": 0})
        wait_until(lambda: page.evaluate("Number(document.body.dataset.logCount) >= 1"), "the first message")
        first = page.evaluate("Number(document.body.dataset.logLast)")
        before, drawn, began = console.cpu_seconds(), renderers(browser), time.monotonic()
        for n in range(1, int(seconds * RATE) + 1):
            time.sleep(max(0.0, began + n / RATE - time.monotonic()))  # the rate is what is measured
            reporter.metric({"rows": n})
        last = first + int(seconds * RATE)
        wait_until(lambda: page.evaluate(f"Number(document.body.dataset.logLast) >= {last}"), "all messages", 120)
        cost = Cost(console.cpu_seconds() - before, renderers(browser) - drawn, time.monotonic() - began)
        counted = "document.body.dataset.logLast - document.body.dataset.logFirst + 1 == document.body.dataset.logCount"
        assert page.evaluate(counted), "a message was lost or doubled"
        watched.check()
        page.close()
        return cost
    finally:
        console.stop()


def renderers(browser: Any) -> float:
    """Return the CPU seconds of the processes that draw the browser's pages."""
    session = browser.new_browser_cdp_session()
    found = session.send("SystemInfo.getProcessInfo")["processInfo"]
    session.detach()
    return float(sum(process["cpuTime"] for process in found if process["type"] == "renderer"))


def long_run(folder: Path) -> WrittenRun:
    """Return a run of `LONG` steps with the figures of a real run, over and over; a checkpoint has removed its rows."""
    run = WrittenRun(folder, steps=LONG)
    subjects, figures = run.subjects, list(recorded("demo").steps.values())
    for first in range(0, LONG, CHUNK):
        cells: list[tuple[str, Any]] = []
        for step in range(first, first + CHUNK):
            cells.append((subjects.numbered("batch", step), Batch([0, 1], 1, 1, 0.5, 0, 8, 1e9 + step)))
            cells.append((subjects.numbered("weights", step + 1), Weights(step + 1, f"f{step + 1}", [], 1)))
            run.trainer.metric({**figures[step % len(figures)], "kind": "step", "step": step, "reward": step / LONG})
        run.table.put_all(cells)
        assert run.trainer.flush(120)
    totals = RowCounts(admitted=ROWS * LONG, trained=ROWS * LONG)
    run.table.put(subjects.numbered("checkpoint", LONG), Checkpoint(LONG, "checkpoints/1", "f", LONG, totals))
    return run


def opening(browser: Any, run: WrittenRun) -> Opening:
    """Open the page of a long run."""
    console = ServedConsole(run, run.cwd)
    try:
        drawn = renderers(browser)
        watched = opened(browser, console)
        watched.page.get_by_text(f"{LONG:,} of {LONG:,}").wait_for(timeout=PATIENCE_MS)
        watched.page.get_by_role("region", name="chart of step/reward").wait_for(timeout=PATIENCE_MS)
        seconds = time.monotonic() - console.shown  # it reads ahead from then on
        found = Opening(console.cpu_seconds(), renderers(browser) - drawn, seconds)
        watched.check()
        watched.page.close()
        return found
    finally:
        console.stop()


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as temporary:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        for name in ("events", "steps"):
            (Path(temporary) / name).mkdir()
        run = WrittenRun(Path(temporary) / "events")
        print(json.dumps({"events": asdict(burst(browser, run, options.seconds))}), flush=True)  # noqa: T201
        run.stop()
        run = long_run(Path(temporary) / "steps")
        print(json.dumps({"long run": asdict(opening(browser, run)), "load": os.getloadavg()[0]}), flush=True)  # noqa: T201
        run.stop()
        browser.close()


if __name__ == "__main__":
    main()
