"""Names of a package that are imported on first use (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: name of the package.
        names: the names that each module of the package gives, separated by spaces.
    """
    module_of = {name: module for module, given in names.items() for name in given.split()}

    def load(name: str) -> Any:
        if name not in module_of:
            msg = f"module {package!r} has no attribute {name!r}; it exports {', '.join(sorted(module_of))}"
            raise AttributeError(msg)
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return load
