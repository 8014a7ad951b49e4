"""A Megatron trainer computes on the first rows of a step before its last row arrives, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from broker.table import Table
from relax_actors.engines.ranks.group import TrainerGroup
from relax_actors.roles.trainer import Trainer
from tests.support.contexts import MakeTrainer
from tests.support.steps import ROWS, batches, fingerprint, put_rows, read_all
from tests.support.tiny_megatron import skip_if_missing

skip_if_missing()

ONE_ROW = ("trainer.backend=megatron", "trainer.max_tokens_per_microbatch=32", "run.deterministic=true")
# Rows that the driver keeps back after each row of a step: the newest row always waits for the next.
KEPT: dict[str, tuple[tuple[str, ...], list[int]]] = {
    "dp2": ((), [0, 1, 0]),
    "tp2": (("tensor_parallel=2",), [0, 0, 0]),
    "cp2": (("context_parallel=2",), [0, 0, 0]),
    "pp2": (("pipeline_parallel=2",), [0, 1, 2]),
}


@pytest.fixture
def trainer_of(make_trainer: MakeTrainer) -> Iterator[Callable[..., Trainer]]:
    """Make trainers whose ranks end with the test."""
    made: list[Trainer] = []

    def make(*settings: str, **arguments: Any) -> Trainer:
        made.append(make_trainer(*settings, **arguments))
        return made[-1]

    yield make
    for trainer in made:
        if isinstance(trainer.engine, TrainerGroup):
            trainer.engine.close()


@pytest.mark.parametrize("aggregate", ["token_mean", "constant"])
def test_one_rank_starts_before_the_last_row_arrives(
    trainer_of: Callable[..., Trainer], table: Table, aggregate: str
) -> None:
    settings = (*ONE_ROW, f"algorithm.aggregate={aggregate}", "algorithm.kl.place=loss", "algorithm.kl.coefficient=0.1")
    trainer, computed = trainer_of(*settings), []
    for index in range(ROWS):
        put_rows(table, 0, [index])
        read_all(table, trainer)
        computed.append(cast("Any", trainer.engine)._update.micro_batches)
    assert computed == [0, 1, 2, 0]
    assert trainer.figures["micro_batches"] == ROWS
    assert trainer.figures["early_seconds"] > 0
    other = trainer_of(*settings, "trainer.stream=false", incarnation=2)
    assert other.engine.fingerprint() == fingerprint(table, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_two_ranks_start_before_the_last_row_arrives(
    trainer_of: Callable[..., Trainer], table: Table, name: str
) -> None:
    section, expected = KEPT[name]
    settings = (
        *ONE_ROW,
        "model.architecture.num_key_value_heads=2",
        "algorithm.aggregate=constant",
        *(f"trainer.megatron.{setting}" for setting in ("ranks=2", *section)),
    )
    trainer, kept = trainer_of(*settings), []
    for index in range(ROWS):
        put_rows(table, 0, [index])
        read_all(table, trainer)
        kept.append(len(cast("Any", trainer.engine)._kept))
    assert batches(table) == {0: list(range(ROWS))}
    assert kept == [*expected, 0]
    other = trainer_of(*settings, "trainer.stream=false", incarnation=2)
    assert other.engine.fingerprint() == fingerprint(table, 1)
