"""`examples/agents/zoom.toml` as `make agents` runs it: a model learns to look closer, and cannot read without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.running import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "zoom.toml"


BLIND = ("run.steps=20", "eval.every=0", "data.function=zoom.blind", "environment.options.tool=false")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_model_learns_to_look_before_it_reads(make_run: Callable[..., Run]) -> None:
    result = make_run("looks", "eval.every=0", config=EXAMPLE).complete(900)
    assert (result["steps"], result["quarantined"]) == (180, 0)
    assert result["eval_last"] >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_digit_cannot_be_read_without_the_tool(make_run: Callable[..., Run]) -> None:
    result = make_run("blind", *BLIND, config=EXAMPLE).complete(600)
    assert 0.1 < result["eval_last"] <= 0.5, "the digit can be read in the whole picture"
