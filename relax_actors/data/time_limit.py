"""Time limit for code of other authors that runs in this process, such as chat templates and tokenizers."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class _InterruptedError(BaseException):
    """Ends a call that ran out of time; no handler for `Exception` stops it."""


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """Return the result of a function that runs in a thread of its own, or raise what it raised.

    A function that loops in Python is interrupted. One that loops in compiled code keeps its thread, which ends with
    the process.

    Args:
        seconds: time for the function.
        function: to call.

    Raises:
        TimeoutError: the function did not end in time.
        RuntimeError: it raised an exception that is no `Exception`, such as a panic of a Rust library.
    """
    answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answer.put((function(), None))
        except BaseException as error:  # noqa: BLE001 the caller raises it
            answer.put((None, error))

    thread = threading.Thread(target=work, name="time-limit", daemon=True)
    thread.start()
    try:
        result, error = answer.get(timeout=seconds)
    except queue.Empty:
        _interrupt(thread)
        msg = f"not done after {seconds:g} s"
        raise TimeoutError(msg) from None
    if isinstance(error, Exception):
        raise error
    if error is not None:
        msg = f"{type(error).__name__}: {error}"
        raise RuntimeError(msg) from error
    found: T = result
    return found


def _interrupt(thread: threading.Thread) -> None:
    """Raise an exception in a thread as soon as it runs Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_InterruptedError))
