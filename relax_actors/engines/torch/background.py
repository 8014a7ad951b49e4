"""Work that a thread of its own does while the caller goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def meanwhile(work: Callable[[], object]) -> Callable[[], None]:
    """Begin `work`; what is given waits for it, and raises what it raised."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="meanwhile")
    begun = thread.submit(work)
    thread.shutdown(wait=False)

    def finish() -> None:
        begun.result()

    return finish
