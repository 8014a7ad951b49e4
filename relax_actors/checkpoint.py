"""Checkpoints on disk: written whole under a temporary name, forced to the disk, renamed, and only then announced."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from broker.errors import StoreFullError
from broker.store import raise_it, with_room


def write(folder: Path, save: Callable[[Path], None], when_full: Callable[[StoreFullError], None] = raise_it) -> None:
    """Let `save` fill a folder and make it appear at `folder`, whole and durable; an older one there is replaced.

    Raises:
        StoreFullError: no space left, and `when_full` gave up.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with_room(lambda: _write(folder, save), folder.parent, f"{folder.parent.name}/{folder.name}", when_full)


def _write(folder: Path, save: Callable[[Path], None]) -> None:
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        save(temporary)
        for path in [*temporary.rglob("*"), temporary]:
            _sync(path)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a checkpoint, and what writers that died left beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in folder.parent.glob(".*.tmp"):
        if not path.name.endswith(f".{os.getpid()}.tmp"):
            shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
