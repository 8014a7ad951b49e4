"""`examples/algorithms` in a short form: a few steps under each preset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faults import story_of
from tests.support.running import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "algorithms"
PRESETS = [line.split() for line in (EXAMPLE / "presets.txt").read_text().splitlines() if not line.startswith("#")]
SHORT = (
    "run.steps=3",
    "eval.rows=8",
    "eval.every=0",
    "data.size=500",
    "trainer.prompts_per_step=4",
    "trainer.warmup_steps=0",
    "trainer.warm_start.steps=4",
)
UNTAUGHT = {"pass_at_k": ("algorithm.correct_reward=0.1",)}
"""What a model that has hardly learned anything needs for a signal."""


@pytest.mark.slow
@pytest.mark.parametrize("preset", [pytest.param(words, id=words[0]) for words in PRESETS])
def test_task_of_the_demo_trains_under_the_preset(make_run: Callable[..., Run], preset: list[str]) -> None:
    name, *settings = preset
    critic = ["critic.warmup_steps=1"] if "critic.warmup_steps" in " ".join(settings) else []
    given = (f"algorithm.name={name}", *settings, *SHORT, *critic, *UNTAUGHT.get(name, ()))
    run = make_run("short", *given, config=EXAMPLE / "sort_digits.toml")
    result = run.complete()
    assert (result["steps"], result["trained"], result["quarantined"]) == (3, 12, 0)
    prints = story_of(run).fingerprints()
    assert len(set(prints.values())) == len(prints) - len(critic), "a step left the weights unchanged"
