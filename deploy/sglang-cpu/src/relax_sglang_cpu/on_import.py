"""Changes modules of SGLang as soon as they are imported, or at once if they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_changes: dict[str, Callable[[Any], None]] = {}


def change(name: str, function: Callable[[Any], None]) -> None:
    """Call a function with the module of that name when the module has been imported."""
    if (module := sys.modules.get(name)) is not None:
        function(module)
    if not _changes:
        sys.meta_path.insert(0, _Finder())
    _changes[name] = function


class _Finder:
    """Finds the modules that are to be changed."""

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> ModuleSpec | None:
        function = _changes.get(name)
        spec = None if function is None else PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: Any) -> None:
                execute(module)
                _changes[name](module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
