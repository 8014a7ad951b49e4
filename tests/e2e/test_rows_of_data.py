"""Runs without a rollout: their examples in a short form, several ranks, and Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faults import story_of
from tests.support.running import SUPPORT, Run
from tests.support.tiny_megatron import skip_if_missing

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY, IMAGES = SUPPORT / "tiny_examples.toml", SUPPORT / "tiny_image_examples.toml"
LABELLED = ("algorithm.name=kto", "data.function=tiny_tasks.labelled")
PAIRS = ("algorithm.name=dpo", "data.function=tiny_tasks.pairs")
ROWS = {
    "examples": (TINY, ()),
    "pairs": (TINY, PAIRS),
    "labelled": (TINY, LABELLED),
    "pictures": (IMAGES, ("run.epochs=2",)),
    "scores": (TINY, ("algorithm.name=reward_model", "data.function=tiny_tasks.pairs")),
    "steps": (
        TINY,
        ("algorithm.name=process_reward", "data.function=tiny_tasks.processes", "examples.step_separator='#'"),
    ),
}
"""Configuration and settings by the rows of a run."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_model_learns_from_examples_and_then_prefers_other_answers(tmp_path: Path) -> None:
    held_out = ("eval.rows=64", "eval.every=0")
    sft = Run(tmp_path, "sft", ["run.steps=60", *held_out], config=EXAMPLES / "sft" / "sft.toml").complete()
    assert (sft["trained"], sft["quarantined"]) == (60 * 64, 0)
    # Mean log-prob of a token: random among 12 characters, and four of the five are sorted.
    assert sft["eval_first"] < -2.3
    assert sft["eval_last"] > -0.9
    model = f"model.path={tmp_path / 'runs' / 'sft' / 'model'}"
    dpo = Run(tmp_path, "dpo", ["run.steps=30", model, *held_out], config=EXAMPLES / "dpo" / "dpo.toml")
    result = dpo.complete()
    assert (result["trained"], result["quarantined"]) == (30 * 32, 0)
    assert result["eval_last"] >= result["eval_first"] + 0.3
    steps = story_of(dpo).steps()
    assert steps[0]["pair_margin"] == pytest.approx(0, abs=1e-4)
    assert steps[-1]["pair_accuracy"] > 0.9


@pytest.mark.slow
def test_versions_that_nobody_was_to_evaluate_are_left_out_after_a_change(make_run: Callable[..., Run]) -> None:
    sft = EXAMPLES / "sft" / "sft.toml"
    settings = ("eval.rows=4", "trainer.schedule=constant", "trainer.warmup_steps=0", "trainer.checkpoint_every=1")
    first = make_run("changed", *settings, "run.steps=3", "eval.every=0", config=sft)
    assert first.complete()["steps"] == 3
    again = make_run("changed", *settings, "run.steps=6", "eval.every=1", config=sft)
    result = again.complete()
    assert (result["steps"], result["quarantined"], result["restarts"]) == (6, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["torch", "megatron"])
@pytest.mark.parametrize("rows", ROWS)
def test_two_ranks_end_with_the_loss_of_one(make_run: Callable[..., Run], backend: str, rows: str) -> None:
    if backend == "megatron":
        skip_if_missing()
    config, settings = ROWS[rows]
    ranks = (f"trainer.backend={backend}", f"trainer.{backend}.ranks=2")
    alone = make_run("alone", *settings, config=config).complete()
    shared = make_run("shared", *settings, *ranks, config=config).complete()
    assert (shared["steps"], shared["trained"]) == (alone["steps"], alone["trained"]) == (8, 60)
    assert shared["loss_last"] == pytest.approx(alone["loss_last"], rel=1e-3)
