"""`relax up` in a real terminal: Ctrl-C stops in order, a second one ends at once and leaves the terminal usable."""

from __future__ import annotations

import os
import pty
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.faults import box
from tests.support.running import TINY, Run, processes_of, wait_until

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
CTRL_C = b"\x03"
LOGIN = "import os, sys; os.login_tty(0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


class Terminal:
    """A terminal of 200 columns with a command that runs in its foreground."""

    def __init__(self, *command: str, cwd: Path) -> None:
        self._keyboard, screen = pty.openpty()
        environment = os.environ | {"COLUMNS": "200", "TERM": "xterm"}
        launch = [sys.executable, "-c", LOGIN, *command]
        self.process = subprocess.Popen(launch, cwd=cwd, stdin=screen, env=environment)
        os.close(screen)
        self.shown = ""

    def type(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)

    def read_until(self, holds: Callable[[], bool], what: str, deadline: float = 90.0) -> None:
        """Read what the command writes until a condition holds."""
        end = time.monotonic() + deadline
        with selectors.DefaultSelector() as selector:
            selector.register(self._keyboard, selectors.EVENT_READ)
            while not holds():
                assert time.monotonic() < end, f"no {what} within {deadline} s:\n{self.shown[-3000:]}"
                for _ in selector.select(0.05):
                    self._read()

    def _read(self) -> None:
        try:
            self.shown += os.read(self._keyboard, 1 << 16).decode(errors="replace")
        except OSError:
            return  # the terminal is closed

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._keyboard)


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
        wait_until(lambda: processes_of(run.folder.root) == [], "end of all processes", 10)
    finally:
        terminal.close()
