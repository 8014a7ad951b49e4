"""Time limit for code of others in this process, such as chat templates."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class _InterruptedError(BaseException):
    """Ends a call that ran out of time; no handler for `Exception` stops it."""


class _Worker:
    """Thread that calls one function after another."""

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        """Functions to call; None ends the thread."""
        self.answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="time-limit", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(_InterruptedError):  # a function that ended just before it was interrupted
            while (function := self.tasks.get()) is not None:
                try:
                    self.answers.put((function(), None))
                except BaseException as error:  # noqa: BLE001 the caller raises it
                    self.answers.put((None, error))

    def interrupt(self) -> None:
        """Raise an exception in the thread as soon as it runs Python code, and let it end."""
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_InterruptedError))
        self.tasks.put(None)


_idle: list[_Worker] = []
"""Workers without a call. To start a thread takes longer than to format and tokenize a short prompt."""
os.register_at_fork(after_in_child=_idle.clear)


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """Return the result of a function that runs in another thread, or raise what it raised.

    A function that loops in Python is interrupted. One that loops in compiled code keeps its thread, which ends with
    the process.

    Raises:
        TimeoutError: the function did not end in time.
        RuntimeError: it raised an exception that is no `Exception`, such as a panic of a Rust library.
    """
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    worker.tasks.put(function)
    try:
        result, error = worker.answers.get(timeout=seconds)
    except queue.Empty:
        worker.interrupt()
        msg = f"not done after {seconds:g} s"
        raise TimeoutError(msg) from None
    _idle.append(worker)
    if isinstance(error, Exception):
        raise error
    if error is not None:
        msg = f"{type(error).__name__}: {error}"
        raise RuntimeError(msg) from error
    value: T = result
    return value
