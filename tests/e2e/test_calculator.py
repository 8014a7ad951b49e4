"""`examples/agents/calculator.toml` in a short form: a model learns to call the tool instead of guessing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.running import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "calculator.toml"
SHORT = ("run.steps=20", "eval.rows=64", "eval.every=0")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_model_learns_to_call_the_calculator(make_run: Callable[..., Run]) -> None:
    result = make_run("short", *SHORT, config=EXAMPLE).complete(600)
    assert (result["steps"], result["trained"], result["quarantined"]) == (20, 160, 0)
    assert result["eval_last"] >= 0.5, "without a call hardly any answer is right"
