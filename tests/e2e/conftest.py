"""A finished run whose steps are kept, for the tests that go back to them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kept_runs import KEPT
from tests.support.running import Run


@pytest.fixture(scope="session")
def kept_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("kept"), "kept", list(KEPT))
    run.complete_healthy()
    yield run
    run.stop()
