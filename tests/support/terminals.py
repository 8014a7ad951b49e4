"""A terminal in which a command runs."""

from __future__ import annotations

import os
import pty
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

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
        self.is_drained = False
        """Whether the command has closed the terminal and all that it wrote was read."""

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
            self.is_drained = True

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._keyboard)
