"""Logging of the processes: one line an event, to the file of standard error."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

import structlog

from relax_actors.printable import printable
from relax_actors.runtime.run_folder import RunFolder

LOG_BYTES = 4 << 20


def rotate(path: Path) -> None:
    """Rotate a log that exceeds `LOG_BYTES`; the previous one is kept as `<name>.1`.

    Processes may have the log open for appending, so it is copied and truncated. Lines written in between are lost.
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
    """Rotate the root's log and touch the folder's lock file; called regularly by roots."""
    rotate(folder.log("root"))
    folder.touch_lock()


class BestEffortFile:
    """Text file that drops what it cannot write: a full disk must not stop a process."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write `text`, or drop it; return the number of characters written."""
        with suppress(OSError, ValueError):
            return self._file.write(text)
        return 0

    def flush(self) -> None:
        """Flush, and ignore errors."""
        with suppress(OSError, ValueError):
            self._file.flush()


def configure(level: int = logging.INFO) -> None:
    """Log to standard error as `timestamp level event key=value ...`, from `level` upwards."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
            lambda _logger, _method, line: printable(line),
        ],
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", BestEffortFile(sys.stderr))),
    )
