"""Atomic writes of small private files."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Write a file atomically, with mode 0600.

    A process killed here leaves the old content or the new one.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # An earlier process with this pid may have left the file. Unlinking also avoids writing through a planted link.
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files that dead processes left in a folder."""
    for path in folder.glob(".*.tmp"):
        pid = path.name.split(".")[-2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)
