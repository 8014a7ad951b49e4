"""Run a function in a background thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def run_in_background(work: Callable[[], object]) -> Callable[[], None]:
    """Start `work` in a thread of its own; the returned function waits for it and raises its exception, if any."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="background")
    future = executor.submit(work)
    executor.shutdown(wait=False)

    def wait() -> None:
        future.result()

    return wait
