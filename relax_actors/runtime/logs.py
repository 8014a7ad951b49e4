"""How our own processes log: one line an event, to the file that their output goes to."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

import structlog

from relax_actors.runtime.run_folder import RunFolder

LOG_BYTES = 4 << 20


def rotate(path: Path) -> None:
    """Begin a log anew if it is over `LOG_BYTES`; the one before is kept as `<name>.1`.

    Processes may have it open to append: the file stays, and is emptied. What they write in that moment is lost.
    """
    with suppress(OSError):
        if path.stat().st_size > LOG_BYTES:
            temporary = path.with_name(f".{path.name}.tmp")
            try:
                shutil.copy(path, temporary)
                temporary.replace(path.with_name(f"{path.name}.1"))
                os.truncate(path, 0)
            finally:
                temporary.unlink(missing_ok=True)


def maintain_root_files(folder: RunFolder) -> None:
    """What the first process of a run or of a node does now and then: its log, and its sign of life."""
    rotate(folder.log("root"))
    folder.touch_lock()


class BestEffortFile:
    """A text file that drops what cannot be written: a full disk, or a closed file, must not stop whoever logs."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write, if there is room."""
        with suppress(OSError, ValueError):
            return self._file.write(text)
        return 0

    def flush(self) -> None:
        """Flush, if there is room."""
        with suppress(OSError, ValueError):
            self._file.flush()


def configure(level: int = logging.INFO) -> None:
    """Log to standard error as `timestamp level event key=value ...`, from `level` on."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", BestEffortFile(sys.stderr))),
    )
