"""Runs without a rollout, killed: the same weights, bit for bit, and every row once an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import cycle

import pytest

from broker.subjects import RowId
from relax_actors.config import load_config
from relax_actors.data.prompt_maker import open_data
from relax_actors.runtime.row_order import RowOrder
from tests.support.faults import hit, story_of
from tests.support.running import SUPPORT, Run, wait_until

EXAMPLES, IMAGES = SUPPORT / "tiny_examples.toml", SUPPORT / "tiny_image_examples.toml"
KILLS = 10
SCORED = ("algorithm.name=dpo", "roles.reference.replicas=1", "run.deterministic=true")
PAIRS = (*SCORED, "data.function=tiny_tasks.pairs")
LABELLED = ("algorithm.name=kto", "data.function=tiny_tasks.labelled")
SCORES = ("algorithm.name=reward_model", "data.function=tiny_tasks.pairs")
OUTCOMES = ("algorithm.name=outcome_reward", "data.function=tiny_tasks.outcomes", "algorithm.scores.classes=3")
STEPS = ("algorithm.name=process_reward", "data.function=tiny_tasks.processes", "examples.step_separator='#'")
STAGES = {
    "examples": (EXAMPLES, (), ("trainer.0", "examples.0", "prompts.0")),
    "labelled": (EXAMPLES, LABELLED, ("trainer.0", "examples.0", "prompts.0")),
    "pairs": (EXAMPLES, PAIRS, ("trainer.0", "reference.0", "examples.0")),
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
    "scores of pairs": (EXAMPLES, SCORES, ("trainer.0", "examples.0", "prompts.0")),
    "scores of answers": (EXAMPLES, OUTCOMES, ("trainer.0", "examples.0", "prompts.0")),
    "scores of steps": (EXAMPLES, STEPS, ("trainer.0", "examples.0", "prompts.0")),
}
"""Configuration, settings and victims by the rows of a run."""
FAST = ("supervision.intensity=100000", "supervision.backoff_max=0.2", "supervision.ack_wait=1")


def trained_tasks(run: Run) -> Counter[int]:
    """How often each of 30 tasks was trained, from the rows that batches name."""
    rows = [RowId(step, index) for step, batch in story_of(run).values("batch").items() for index in batch.rows]
    config = load_config(EXAMPLES)
    order = RowOrder(config, open_data(config.data))
    return Counter(order.item(row) for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rows", STAGES)
def test_killed_run_on_rows_of_data_ends_with_the_same_bits(make_run: Callable[..., Run], rows: str) -> None:
    config, settings, victims = STAGES[rows]
    calm = make_run("calm", "run.epochs=6", *settings, config=config).complete_healthy()
    # 180 rows in steps of 8: the last step has 4.
    assert (calm["steps"], calm["trained"], calm["admitted"]) == (23, 180, 180)
    run = make_run("killed", "run.epochs=6", *settings, *FAST, config=config).start()
    for n, victim in zip(range(KILLS), cycle(victims), strict=False):
        wait_until(lambda n=n: run.table.get(f"relax.killed.batch.{2 * n}"), f"batch.{2 * n}", 120)
        hit(run, victim)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["steps"], result["trained"], result["admitted"]) == (23, 180, 180)
    assert result["weights_fingerprint"] == calm["weights_fingerprint"]
    assert result["restarts"] >= KILLS
    assert trained_tasks(run) == dict.fromkeys(range(30), 6)
