"""Waiting for a live run, in the programs that picture and record one for the docs."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait(holds: Callable[[], bool], seconds: float = 300) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: it did not in time.
    """
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.2)
