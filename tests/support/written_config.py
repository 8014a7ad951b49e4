"""Configuration files that a test writes, and the error that loading one gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from relax_actors.config import load_config
from relax_actors.errors import ConfigError

SMALL = """\
[model]
path = "model"

[data]
kind = "jsonl"
path = "tasks.jsonl"
"""
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(more: str = "", text: str = SMALL) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text + more)
        return path

    return make


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return str(caught.value)
