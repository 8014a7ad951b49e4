"""Import nats-py and structlog without optional packages that relax does not use.

nats-py imports aiohttp for brokers behind WebSocket, structlog imports rich to print tracebacks: 0.3 s of each command.
"""

from __future__ import annotations

import sys
from typing import Any

SKIPPED = {"aiohttp": ("nats.aio.transport",), "rich": ("structlog.dev", "structlog.tracebacks")}
"""Packages, and the modules for which they are not installed. Other modules import them as usual, at any time."""


class _Finder:
    """Finds no module; refuses the imports of `SKIPPED`."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> None:
        if name in SKIPPED and _importer() in SKIPPED[name]:
            raise ModuleNotFoundError(name, name=name)


def _importer() -> str:
    """Name of the importing module: the first frame outside this one and the import system."""
    frame = sys._getframe(1)  # noqa: SLF001 the only way to learn who imports
    passed = (__name__, "importlib.", "_frozen_importlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(passed):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def skip_optional_imports() -> None:
    """Skip the imports of `SKIPPED` in this process; call it before importing nats."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
