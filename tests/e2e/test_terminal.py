"""`relax up` in a real terminal: Ctrl-C stops in order, a second one ends at once and leaves the terminal usable."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults import box
from tests.support.running import TINY, Run, processes_of, wait_until
from tests.support.terminals import Terminal

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
CTRL_C = b"\x03"


@pytest.mark.slow
def test_second_ctrl_c_shows_the_cursor_and_says_what_is_left_undone(tmp_path: Path) -> None:
    run = Run(tmp_path, "pty")
    settings = ("run.name=pty", "reward.function=tiny_tasks.hang", "supervision.shutdown=60")
    terminal = Terminal("-m", "relax_actors.cli.main", "up", str(TINY), *settings, cwd=tmp_path)
    try:
        # The reward's actor hangs on its first row, so that it cannot stop in order.
        terminal.read_until(run.folder.black_box("reward.0").exists, "reward.0")
        terminal.read_until(lambda: bool(box(run, "reward.0").rows) and HIDE_CURSOR in terminal.shown, "hanging row")
        terminal.type(CTRL_C)
        terminal.read_until(lambda: "a second Ctrl-C ends them at once" in terminal.shown, "answer to Ctrl-C")
        assert terminal.process.poll() is None
        terminal.type(CTRL_C)
        terminal.read_until(lambda: terminal.process.poll() is not None, "end")
        terminal.read_until(lambda: terminal.shown.endswith("resumes the run\r\n"), "last words", 5)
        assert terminal.process.returncode == 130
        assert terminal.shown.rindex(SHOW_CURSOR) > terminal.shown.rindex(HIDE_CURSOR)
        python = terminal.shown.rpartition("`")[0].rpartition("`")[2].split()[0]
        assert terminal.shown.rpartition(SHOW_CURSOR)[2] == (
            "\r\nkilled 5 actors at once; steps after checkpoint 0 will be replayed; "
            f"`{python} -m relax_actors.cli.main up {TINY} {' '.join(settings)}` resumes the run\r\n"
        )
        wait_until(lambda: processes_of(run.folder.root) == [], "end of all processes")
    finally:
        terminal.close()
