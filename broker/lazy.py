"""Names of a package that are imported on first use (PEP 562)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def lazy(package: str) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports the names of its `if TYPE_CHECKING`."""

    @cache
    def modules() -> dict[str, str]:
        # `Any`, because the import of importlib.abc takes 10 ms.
        loader: Any = sys.modules[package].__loader__
        (block,) = (node for node in ast.parse(loader.get_source(package)).body if isinstance(node, ast.If))
        imports = (node for node in block.body if isinstance(node, ast.ImportFrom))
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def load(name: str) -> Any:
        if name.startswith("__") or name not in modules():
            msg = f"module {package!r} has no attribute {name!r}; it exports {', '.join(sorted(modules()))}"
            raise AttributeError(msg)
        return getattr(import_module(modules()[name]), name)

    return load
