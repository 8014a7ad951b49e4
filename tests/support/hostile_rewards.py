"""Reward functions that attack the machine they run on; what they reached is in the log of their actor."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from pathlib import Path

from relax_actors.messages import Prompt
from relax_actors.runtime.exit_codes import EXIT_CRASHED

FOLDERS, PORTS, FILES = "HOSTILE_FOLDERS", "HOSTILE_PORTS", "HOSTILE_FILES"
"""Environment variables with what to attack, separated by spaces."""


def _succeeds(act: Callable[[], object]) -> bool:
    try:
        return bool(act())
    except OSError:
        return False


def _connects(port: int, host: str = "127.0.0.1") -> bool:
    with socket.create_connection((host, port), 1):
        return True


def _writes(folder: str) -> bool:
    path = Path(folder) / "planted"
    path.write_text("x")
    return path.exists()


def _mounts() -> bool:
    return ctypes.CDLL(None).mount(b"none", b"/mnt", b"tmpfs", 0, None) == 0


def reached() -> list[str]:
    """What of the machine this process can reach."""
    found = [f"port {port}" for port in os.environ[PORTS].split() if _succeeds(lambda port=port: _connects(int(port)))]
    found += ["internet"] if _succeeds(lambda: _connects(53, "8.8.8.8")) else []
    for folder in os.environ[FOLDERS].split():
        found += [f"write {folder}"] if _succeeds(lambda folder=folder: _writes(folder)) else []
    for path in os.environ[FILES].split():
        found += [f"read {path}"] if _succeeds(lambda path=path: Path(path).read_bytes()) else []
    found += ["processes"] if len([name for name in os.listdir("/proc") if name.isdigit()]) > 3 else []  # noqa: PTH208
    found += ["mount"] if _mounts() else []
    return found


def attack(completion: str, _prompt: Prompt) -> float:
    """Score honestly if no attack succeeds; otherwise end the process with what succeeded in its log."""
    if found := reached():
        os.write(2, f"REACHED {found}\n".encode())
        os._exit(EXIT_CRASHED)
    return completion.count("7") / max(1, len(completion))


def fork_bomb(completion: str, _prompt: Prompt) -> float:
    """Fork until refused; then score."""
    children = []
    try:
        while len(children) < 500:
            if (child := os.fork()) == 0:
                os.read(0, 1)
                while True:
                    os.kill(os.getpid(), 19)
            children.append(child)
    except OSError:
        os.write(2, f"FORKED {len(children)}\n".encode())
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
    return completion.count("7") / max(1, len(completion))
