"""Fixtures of the console's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.consoles import WrittenRun


@pytest.fixture
def written(tmp_path: Path) -> Iterator[WrittenRun]:
    """A run that is up, without processes."""
    run = WrittenRun(tmp_path)
    yield run
    run.stop()
