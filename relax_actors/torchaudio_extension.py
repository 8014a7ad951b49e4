"""Lets torchaudio be imported beside a torch that its compiled extension was not built for.

The wheel on PyPI is built for one version of CUDA. Beside a torch without CUDA its import fails, and with it the import
of every model of transformers, which imports torchaudio where it is installed. Resampling needs no extension.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "torchaudio._extension"


class _Finder:
    """Finds the module that loads the extension."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != NAME:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _execute(own: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run the module by its loader, and report where there is no extension."""
    try:
        own(module)
    except (OSError, ImportError, RuntimeError, AttributeError) as error:
        vars(module).update(_IS_TORCHAUDIO_EXT_AVAILABLE=False, fail_if_no_align=_failing(error))


def _failing(cause: Exception) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for functions that need the extension."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*_args: Any, **_settings: Any) -> Any:
            msg = f"{function.__name__} needs the extension of torchaudio, which does not fit this torch: {cause}"
            raise RuntimeError(msg) from cause

        return failing

    return decorate


def permit_import() -> None:
    """Let imports of torchaudio succeed in this process, with or without its extension."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
