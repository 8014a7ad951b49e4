"""Statements of TRL's own functions, run on given variables.

TRL computes advantages in the middle of long methods. The statements are taken from the installed source, so importing
TRL and building a trainer is not needed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

VERSION = "1.16."


def require_trl() -> None:
    """Skip the module unless TRL 1.16 is installed."""
    try:
        found = version("trl")
    except PackageNotFoundError:
        pytest.skip("TRL is not installed: pip install relax-actors[parity]", allow_module_level=True)
    if not found.startswith(VERSION):
        pytest.skip(f"TRL is {found}, compared is {VERSION}*", allow_module_level=True)


@cache
def _tree(file: str) -> ast.Module:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text())


def _function(file: str, name: str) -> ast.FunctionDef:
    return next(node for node in ast.walk(_tree(file)) if isinstance(node, ast.FunctionDef) and node.name == name)


def function(file: str, name: str, **known: Any) -> Callable[..., Any]:
    """Return a function of one of TRL's files; `known` are the names that it refers to."""
    module = ast.Module([_function(file, name)], [])
    known = {"torch": torch, **known}
    exec(compile(module, file, "exec"), known)  # noqa: S102 the installed package's own code
    found: Callable[..., Any] = known[name]
    return found


def run(file: str, name: str, first: str, last: str, **known: Any) -> dict[str, Any]:
    """Run the statements of a function from the one that begins with `first` to the one that begins with `last`.

    Args:
        file: path in the package.
        name: function.
        first: beginning of the first statement's source.
        last: beginning of the last statement's source.
        known: variables before.

    Returns:
        The variables after.
    """
    body = _function(file, name).body
    sources = [ast.unparse(node) for node in body]
    begin = next(i for i, source in enumerate(sources) if source.startswith(first))
    end = next(i for i, source in enumerate(sources) if i >= begin and source.startswith(last))
    known = {"torch": torch, **known}
    exec(compile(ast.Module(body[begin : end + 1], []), file, "exec"), known)  # noqa: S102 as above
    return known
