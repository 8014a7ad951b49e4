"""What hostile code in an actor writes to the black box and the status pipe, which its supervisor reads."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

from broker.leases import RunState
from broker.pull import Delivery
from broker.streams import ensure_bucket
from broker.subjects import RowId
from broker.table import Table
from relax_actors.runtime.blackbox import SIZE, BlackBox
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.launch import Launch
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.reporter import Reporter
from relax_actors.supervision.spec import Backoff, Blame, ChildSpec, Exit, Limits
from relax_actors.supervision.supervisor import Supervisor
from tests.support.process_trees import HEAD, Recorder, TreeThread, python
from tests.support.running import wait_until

TEXTS = {
    "nested": b"[" * (SIZE - 12),
    "no text": b"\xff" * 100,
    "numbers": b'[[1, 2], "x", 0]',
    "no list": b'[7, "x", 0]',
    "surrogate": b'[["\\ud800"], "x", 0]',
    "time": b'[["group.0.0"], "x", "now"]',
    "long number": b'[["group.0.0"], "x", 1' + b"0" * 400 + b"]",
}


@pytest.fixture
def box(tmp_path: Path) -> BlackBox:
    found = BlackBox(tmp_path / "box")
    found.reset()
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_malformed_record_has_no_rows(box: BlackBox, tmp_path: Path, name: str) -> None:
    with (tmp_path / "box").open("r+b") as file:
        file.write(struct.pack("=dI", 7.5, len(TEXTS[name])) + TEXTS[name])
    found = box.read()
    assert (found.beat, found.rows, found.waiting_for) == (7.5, (), "")


def test_length_beyond_the_file_is_not_read(box: BlackBox, tmp_path: Path) -> None:
    with (tmp_path / "box").open("r+b") as file:
        file.write(struct.pack("=dI", 7.5, 2**32 - 1))
    assert box.read().rows == ()


@pytest.mark.parametrize("size", [0, 5, 4096, SIZE + 30])
def test_record_that_was_cut_off_is_read_as_far_as_it_goes(box: BlackBox, tmp_path: Path, size: int) -> None:
    """Access to a map behind the end of its file would kill this process."""
    box.record_delivery(Delivery(1, 2, 3))
    os.truncate(tmp_path / "box", size)
    found = box.read_with_deliveries()
    assert (found.rows, found.deliveries) == ((), (Delivery(1, 2, 3),) if size > SIZE else ())
    assert (box.last_beat() > 0) == (size > 12)
    box.close()
    again = BlackBox(tmp_path / "box")
    again.record(["group.0.0"])
    assert again.read().rows == ("group.0.0",)


HOSTILE = (
    HEAD
    + """
fd = int(os.environ["RELAX_STATUS_FD"])
for line in (b"[" * 100000, b"\\xff", b"7", b'{"child_failure": [1]}', b'{"child_failure": [1, 2, 3, 4, 5, 6]}'):
    os.write(fd, line + b"\\n")
for _ in range(64):
    os.write(fd, b"x" * 65536)
os.write(fd, b"\\n")
os.truncate(BOX, 0)
say(ready=True)
while True: signal.pause()
"""
)


def test_supervisor_outlives_what_its_child_writes(tmp_path: Path) -> None:
    path = tmp_path / "box"
    launch = Launch(python(f"BOX = {str(path)!r}\n{HOSTILE}"), tmp_path / "log", path)
    limits = Limits(5, 60.0)
    supervisor = Supervisor([ChildSpec("a")], limits, Backoff(0.01, 0.05), random.Random(1))
    recorder = Recorder()
    running = TreeThread(ProcessTree({"a": supervisor}, lambda _: launch, recorder, 1.0), recorder)
    try:
        running.until("ready", "a")
        ended = running.until("ended", "a")  # without a sign of life
        assert ended.last is not None
        assert ended.last.rows == ()
        running.until("ready", "a")
    finally:
        running.stop()


def test_rows_that_are_none_keep_no_row_from_being_blamed(table: Table, tmp_path: Path) -> None:
    connection, subjects = table.connection, table.subjects
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))
    reporter = Reporter(RunFolder(tmp_path / "run"), connection, state, Journal(connection, subjects, "node", 0))
    box = BlackBox(tmp_path / "box")
    box.record(["no row", "group.*.0", "", "group.1.2"])
    reporter.ended("reward.0", Exit(normal=False, reason="exit code 70", blame=Blame.ROWS), box.read())
    wait_until(lambda: connection.call(state.failures("reward", RowId(1, 2)), 10).count, "the failure of the row")
