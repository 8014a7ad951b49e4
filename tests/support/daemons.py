"""Reward function and rollout that start daemons, as a program may that they call: double fork, own session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from relax_actors.messages import Prompt
from relax_actors.roles.rollout import Rollout

FOLDER = "DAEMONS_FOLDER"
SLEEP = [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]


def start(name: str) -> None:
    """Start two daemons, one without an environment, and append their ids to a file, once in each process."""
    path = Path(os.environ[FOLDER]) / f"{name}.{os.getpid()}"
    if path.exists():
        return
    read, write = os.pipe()
    for environment in (None, {}):
        if (child := os.fork()) == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(write, f"{os.getpid()} ".encode())
                if environment is None:
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    signal.pause()
                os.execve(SLEEP[0], SLEEP, environment)  # noqa: S606
            os._exit(0)
        os.waitpid(child, 0)
    # A grandchild in a session of its own, whose parent is still there.
    grandchild = f"import subprocess, sys; print(subprocess.Popen({SLEEP!r}, start_new_session=True).pid); input()"
    process = subprocess.Popen([sys.executable, "-c", grandchild], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    text = b""
    while text.count(b" ") < 2:
        text += os.read(read, 100)
    path.with_suffix(".new").write_text(f"{text.decode()} {process.pid} {process.stdout.readline().decode()}")
    path.with_suffix(".new").rename(path)


def score(completion: str, _prompt: Prompt) -> float:
    start("reward")
    return completion.count("7") / max(1, len(completion))


class DaemonRollout(Rollout):
    """Built-in rollout, forked by the zygote, that starts daemons."""

    def setup(self) -> None:
        super().setup()
        start("rollout")
