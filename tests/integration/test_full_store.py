"""The trainer frees the files of finished rows soon while the file system of the store is nearly full."""

from __future__ import annotations

import os
from pathlib import Path

from broker.table import Table
from relax_actors.messages import Evaluation
from relax_actors.training.collector import FULL_STORE_SECONDS, SWEEP_SECONDS, Collector
from tests.support.contexts import context_of
from tests.support.running import wait_until


def test_a_store_that_is_nearly_full_is_swept_soon(table: Table, small_disk: Path) -> None:
    context = context_of(table, small_disk, "trainer", (), 1)
    table = context.table
    for version in (1, 2):
        table.put(table.subjects.numbered("evaluation", version), Evaluation(version, 0.5, 1, {}))
    finished = table.store.root / "eval/1/segment"
    finished.parent.mkdir(parents=True)
    finished.touch()
    collector = Collector.start(context, ("trainer",), {"evaluation": Evaluation})
    try:
        wait_until(lambda: not finished.parent.exists(), "first sweep")
        with (small_disk / "other").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 60 << 20)
        finished.parent.mkdir(parents=True)
        finished.touch()
        wait_until(lambda: not finished.parent.exists(), "second sweep", (FULL_STORE_SECONDS + SWEEP_SECONDS) / 2)
    finally:
        collector.stop()
