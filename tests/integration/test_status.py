"""`relax status` of a run prints figures for people."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_actors.cli.status import as_text
from tests.support.running import Run, relax, wait_until


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "none yet"), (0.123456789, "0.1235"), (1, "1"), ([], "none"), (["a", "b"], "a; b"), ("demo", "demo")],
)
def test_figures_are_rounded_and_nothing_is_none(value: object, text: str) -> None:
    assert as_text(value) == text


@pytest.mark.slow
def test_status_of_a_run_before_and_after_its_first_step(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run("stands", "run.steps=100000", "trainer.checkpoint_every=1000").start()
    wait_until(lambda: run.table.get("relax.stands.weights.0"), "weights.0")
    said = relax("status", "stands", cwd=tmp_path).stdout
    assert "None" not in said, said
    wait_until(lambda: run.table.get("relax.stands.batch.1"), "batch.1")
    said = relax("status", "stands", cwd=tmp_path).stdout
    shown = dict(line.split(None, 1) for line in said.splitlines() if line[:1].islower())
    assert len(shown["reward"].strip()) <= len("0.1234")
    body = json.loads(relax("status", "stands", "--json", cwd=tmp_path).stdout)
    assert isinstance(body["reward"], float)
