"""Fixtures of the console's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browsers import ARGUMENTS, CHROMIUM
from tests.support.consoles import WrittenRun


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def written(tmp_path: Path) -> Iterator[WrittenRun]:
    """A run that is up, without processes."""
    run = WrittenRun(tmp_path)
    yield run
    run.stop()
