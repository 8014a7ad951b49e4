"""Runs without a rollout, killed: the same weights, bit for bit, and every row once an epoch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest

from tests.chaos.run_kinds import DATA_ROWS, EXAMPLES, rows_of_data
from tests.support.faults import story_of
from tests.support.kills import kill_actors
from tests.support.running import SUPPORT, Run

IMAGES = SUPPORT / "tiny_image_examples.toml"
KILLS = 10
SCORED = ("algorithm.name=dpo", "roles.reference.replicas=1", "run.deterministic=true")
PAIRS = (*SCORED, "data.function=tiny_tasks.pairs")
LABELLED = ("algorithm.name=kto", "data.function=tiny_tasks.labelled")
OUTCOMES = ("algorithm.name=outcome_reward", "data.function=tiny_tasks.outcomes", "algorithm.scores.classes=3")
STEPS = ("algorithm.name=process_reward", "data.function=tiny_tasks.processes", "examples.step_separator='#'")
STAGES = {
    "labelled": (EXAMPLES, LABELLED, ("trainer.0", "examples.0", "prompts.0")),
    "pictures": (IMAGES, (), ("trainer.0", "examples.0", "prompts.0")),
    "pairs with pictures": (
        IMAGES,
        (*SCORED, "data.function=tiny_images.pairs"),
        ("trainer.0", "reference.0", "examples.0"),
    ),
    "weighted pairs of a refreshed reference": (
        EXAMPLES,
        (
            *PAIRS,
            "algorithm.reference_every=4",
            "algorithm.pairs.weighted=true",
            "algorithm.pairs.ld_alpha=0.5",
            "trainer.checkpoint_every=3",
        ),
        ("reference.0", "trainer.0", "reference.0", "examples.0"),
    ),
    "scores of answers": (EXAMPLES, OUTCOMES, ("trainer.0", "examples.0", "prompts.0")),
    "scores of steps": (EXAMPLES, STEPS, ("trainer.0", "examples.0", "prompts.0")),
}
"""Configuration, settings and victims by the rows of a run."""
HEALTHY = {"examples", "labelled"}
"""Kinds of runs in which `relax doctor` looks for problems."""
FAST = ("supervision.intensity=100000", "supervision.backoff_max=0.2", "supervision.ack_wait=1")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rows", STAGES)
def test_killed_run_on_rows_of_data_ends_with_the_same_bits(make_run: Callable[..., Run], rows: str) -> None:
    config, settings, victims = STAGES[rows]
    undisturbed = make_run("calm", "run.epochs=6", *settings, config=config)
    calm = undisturbed.complete_healthy() if rows in HEALTHY else undisturbed.complete()
    # 180 rows in steps of 8: the last step has 4.
    assert (calm["steps"], calm["trained"], calm["admitted"]) == (23, 180, 180)
    run = make_run("killed", "run.epochs=6", *settings, *FAST, config=config).start()
    kill_actors(run, zip((f"batch.{2 * n}" for n in range(KILLS)), cycle(victims), strict=False))
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["steps"], result["trained"], result["admitted"]) == (23, 180, 180)
    assert result["weights_fingerprint"] == calm["weights_fingerprint"]
    assert rows_of_data(story_of(run)) == dict.fromkeys(range(DATA_ROWS), 6)
