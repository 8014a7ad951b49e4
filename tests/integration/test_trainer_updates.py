"""Several updates of a batch by a trainer on a real server: minibatches, and replays after kills."""

from __future__ import annotations

from typing import Any

import pytest

from broker.table import Table
from relax_actors.engines.torch.backend import TorchTrainingBackend
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.errors import ConfigError
from relax_actors.roles.trainer import Trainer
from relax_actors.training.step_feed import minibatches
from relax_actors.training.step_rows import StepReader
from tests.support.contexts import MakeContext, MakeTrainer
from tests.support.messages import assert_says
from tests.support.steps import ROWS, SAMPLES, TOKENS, batches, fingerprint, put_step, read_all

UPDATES = ("trainer.minibatches=2", "trainer.epochs=2", "algorithm.proximal=trainer", "trainer.learning_rate=1e-2")


@pytest.mark.parametrize("proximal", ["trainer", "rollout"])
def test_several_updates_of_a_batch_are_those_of_its_minibatches(
    make_trainer: MakeTrainer, make_context: MakeContext, table: Table, proximal: str
) -> None:
    trainer = make_trainer(*UPDATES, f"algorithm.proximal={proximal}")
    put_step(table, 0, version=0)
    read_all(table, trainer)
    assert batches(table) == {0: [0, 1, 2, 3]}
    metrics = trainer.figures
    assert (metrics["updates"], metrics["tokens"], metrics["early_seconds"]) == (4, 2 * ROWS * SAMPLES * TOKENS, 0)

    context = make_context("trainer", *UPDATES, f"algorithm.proximal={proximal}")
    engine = TorchEngine(context.config)
    engine.initialise(context.config.run.seed)
    engine.finish_warm_start()
    whole = StepReader(context, {}).read_again(0, range(ROWS))
    if proximal == "trainer":
        whole = whole.with_proximal(iter(engine.score(whole.samples(), lambda: None)))
    for rows in minibatches(ROWS, 2, 2, context.config.run.seed, 0):
        engine.accumulate(whole.part(rows).samples(), lambda: None)
        result = engine.step(0, lambda: None)
    if proximal == "trainer":
        assert result.metrics["clipped"] > 0  # the ratio has left 1
    assert engine.fingerprint() == fingerprint(table, 1)


def test_killed_trainer_replays_all_updates_of_a_batch(make_trainer: MakeTrainer, table: Table) -> None:
    trainer = make_trainer(*UPDATES)
    finished = trainer.engine.step

    def die_at_third_update(*arguments: Any) -> Any:
        if len(updates) == 2:
            raise KeyboardInterrupt
        updates.append(finished(*arguments))
        return updates[-1]

    updates: list[Any] = []
    trainer.engine.step = die_at_third_update  # type: ignore[method-assign]
    put_step(table, 0, version=0)
    with pytest.raises(KeyboardInterrupt):
        read_all(table, trainer)
    assert batches(table) == {0: [0, 1, 2, 3]}
    other = make_trainer(*UPDATES, incarnation=2)
    assert other.figures["updates"] == 4
    third = make_trainer(*UPDATES, incarnation=3)
    assert third.engine.fingerprint() == other.engine.fingerprint() == fingerprint(table, 1)


def test_engine_that_cannot_score_refuses_several_updates_with_its_own_proximal_policy(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithoutScore(TorchEngine):
        score = None  # type: ignore[assignment]

    monkeypatch.setattr(TorchTrainingBackend, "build", lambda _, context: WithoutScore(context.config))
    trainer = Trainer()
    trainer.context = make_context("trainer", *UPDATES)
    with pytest.raises(ConfigError) as raised:
        trainer.setup()
    assert_says(
        raised.value,
        "trainer.backend = 'torch'",
        "4 updates",
        'algorithm.proximal = "rollout"',
        "trainer.minibatches = 1",
    )
