"""Stacks as text: of a thread, and the place in a user's code that a stack names."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def thread_stack(thread_id: int | None) -> traceback.StackSummary:
    """Return the current stack of a thread; empty if there is no such thread."""
    frame = sys._current_frames().get(thread_id or -1)  # noqa: SLF001 the only way to look at another thread
    return traceback.extract_stack(frame) if frame else traceback.StackSummary()


def innermost(stack: traceback.StackSummary) -> traceback.FrameSummary | None:
    """Return the innermost frame outside of installed packages, or else the innermost."""
    frames = [frame for frame in stack if not frame.filename.startswith((*_LIBRARIES, "<frozen"))] or [*stack]
    return frames[-1] if frames else None


def place(stack: traceback.StackSummary) -> str:
    """Name the place of a stack for people: `score (rewards.py:12)`; empty for an empty stack."""
    frame = innermost(stack)
    return "" if frame is None else f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
