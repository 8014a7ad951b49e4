"""`examples/agents/review.toml` in a short form: one model learns to pick, and to judge its own picks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.running import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "review.toml"
SHORT = ("run.steps=40", "eval.rows=64", "eval.every=0")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_model_learns_to_play_solver_and_critic(make_run: Callable[..., Run]) -> None:
    result = make_run("short", *SHORT, config=EXAMPLE).complete(800)
    assert (result["steps"], result["trained"], result["quarantined"]) == (40, 640, 0)
    assert result["eval_last"] >= 1.3, "before training it earns 1.0 of 2"
