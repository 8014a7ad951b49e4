"""Children that are to stop finish their work or return it, and delay nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from relax_actors.supervision.spec import ChildSpec, Exit
from tests.support.process_trees import (
    HEAD,
    PATIENCE,
    WAITS,
    RunTree,
)

DRAINS = HEAD + (
    "def end(*_):\n    signal.sigtimedwait([], 1.0)\n    open(os.environ['CHILD'], 'w').close()\n    sys.exit(0)\n"
    "signal.signal(15, end)\nsay(ready=True)\nwhile True: signal.pause()\n"
)


def test_surplus_child_finishes_its_current_rows(run: RunTree, tmp_path: Path) -> None:
    done = tmp_path / "done"
    running = run({"a": WAITS, "b": DRAINS.replace("os.environ['CHILD']", repr(str(done)))}, shutdown=0.1, drain=20.0)
    for _ in "ab":
        running.until("ready")
    running.tree.resize("a", [ChildSpec("a")])
    assert running.until("ended", "b").outcome == Exit(normal=True, reason="stopped")
    assert done.exists()


def test_surplus_child_does_not_delay_the_shutdown(run: RunTree) -> None:
    stubborn = HEAD + "signal.signal(15, signal.SIG_IGN)\nsay(ready=True)\nwhile True: signal.pause()\n"
    running = run({"a": WAITS, "b": stubborn}, shutdown=0.2, drain=600.0)
    for _ in "ab":
        running.until("ready")
    running.tree.resize("a", [ChildSpec("a")])
    assert running.stop() is None


KEEPS_ROWS = HEAD + (
    "signal.signal(15, signal.SIG_IGN)\n"
    "def end(*_):\n    open('{mark}', 'w').close()\n    os._exit(0)\n"
    "signal.signal(signal.SIGUSR1, end)\nsay(ready=True)\nwhile True: signal.pause()\n"
)


@pytest.mark.parametrize("limited", [False, True], ids=["its own time", "a limit of the tree"])
def test_child_that_does_not_stop_returns_its_rows_before_it_is_killed(
    run: RunTree, tmp_path: Path, *, limited: bool
) -> None:
    mark = tmp_path / "returned"
    shutdown = 600.0 if limited else 0.6
    running = run({"a": KEEPS_ROWS.replace("{mark}", str(mark))}, shutdown=shutdown, returns_rows=True)
    running.until("ready")
    if limited:
        running.tree.limit_stop(0.6)
    began = time.monotonic()
    assert running.stop() is None
    assert mark.exists()
    assert 0.4 <= time.monotonic() - began < PATIENCE / 2
