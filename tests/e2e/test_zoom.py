"""`examples/agents/zoom.toml` in a short form: a model learns to look closer, and cannot read without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.running import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "zoom.toml"
SHORT = ("run.steps=40", "eval.rows=128", "eval.every=0")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_model_learns_to_look_before_it_reads(make_run: Callable[..., Run]) -> None:
    result = make_run("short", *SHORT, config=EXAMPLE).complete(600)
    blind = make_run("blind", *SHORT, "environment.options.tool=false", config=EXAMPLE).complete(600)
    assert (result["steps"], result["quarantined"]) == (40, 0)
    assert result["eval_last"] >= 0.8
    assert blind["eval_last"] <= 0.7, "the whole picture is too small to read the digit"
