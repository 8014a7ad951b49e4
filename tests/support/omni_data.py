"""Data of the tasks of examples/omni with few rows."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "omni"
SPOKEN = ("sound", "omni")


def omni_module(name: str) -> Any:
    """Import a module of the example."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def needs_speech() -> None:
    """Skip a test without the synthesiser."""
    if shutil.which("espeak-ng") is None:
        pytest.skip("needs espeak-ng (apt install espeak-ng)")


def small_data(task: str, folder: Path, *, rows: int = 12, held_out: int = 6) -> list[str]:
    """Make the data of a task, and return the settings that name it."""
    if task in SPOKEN:
        needs_speech()
    omni_module("make_data").make(task, folder / task, rows=rows, held_out=held_out, seed=3)
    files = (folder / task / f"{name}.jsonl" for name in ("train", "test"))
    return [f"{key}={path}" for key, path in zip(("data.path", "eval.data.path"), files, strict=True)]
