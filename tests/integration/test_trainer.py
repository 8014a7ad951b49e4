"""Trainer on a real server with a tiny real model: staleness, proximal policy, streaming, checkpoints, lost files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from broker.subjects import RowId
from broker.table import Table
from relax_actors.errors import AllRowsFailedError, ConfigError
from relax_actors.messages import Dropped, Quarantined, Trajectory
from relax_actors.messages.samples import fingerprints_of
from relax_actors.roles.trainer import Trainer
from tests.support.contexts import MakeTrainer
from tests.support.steps import ROWS, SAMPLES, TOKENS, batches, fingerprint, put_rows, put_step, read_all

CORRECTED = ("algorithm.proximal=trainer", "algorithm.correction.kind=tis")


def test_too_old_row_is_dropped_and_its_successor_trained(make_trainer: MakeTrainer, table: Table) -> None:
    trainer = make_trainer()
    for step in (0, 1, 2):
        put_step(table, step, version=0)
    read_all(table, trainer)
    read_all(table, trainer)  # step 2 is due once weights 1 are read
    assert batches(table) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    for index in range(ROWS):
        dropped = table.fetch(table.subject(RowId(2, index), "dropped"), Dropped)
        assert dropped == Dropped("too_old", "staleness 2 is over staleness.max")
    put_step(table, 2, version=1, first=ROWS)
    read_all(table, trainer)
    assert batches(table)[2] == [4, 5, 6, 7]


def test_code_of_the_trainer_has_worked_after_a_step_and_not_after_cells(
    make_trainer: MakeTrainer, table: Table
) -> None:
    trainer = make_trainer()
    put_rows(table, 0, range(ROWS - 1))
    read_all(table, trainer)
    assert not trainer.has_worked(1000)
    put_rows(table, 0, [ROWS - 1])
    read_all(table, trainer)
    assert batches(table) == {0: [0, 1, 2, 3]}
    assert trainer.has_worked(0)


def test_row_without_a_pair_is_dropped_and_its_successor_trained(make_trainer: MakeTrainer, table: Table) -> None:
    trainer = make_trainer("algorithm.name=online_dpo", "algorithm.shaping.filter_zero_variance=false")
    put_step(table, 0, version=0)  # the advantages of row 2 are all negative
    read_all(table, trainer)
    dropped = table.fetch(table.subject(RowId(0, 2), "dropped"), Dropped)
    assert dropped is not None
    assert (dropped.reason, "no pair" in dropped.detail) == ("no_signal", True)
    assert batches(table) == {}
    put_rows(table, 0, [2 + ROWS])
    read_all(table, trainer)
    assert batches(table) == {0: [0, 1, 3, 6]}


def test_policy_correct_trains_too_old_rows_with_the_correction(make_trainer: MakeTrainer, table: Table) -> None:
    trainer = make_trainer("staleness.policy=correct", *CORRECTED)
    for step in (0, 1, 2):
        put_step(table, step, version=0)
    read_all(table, trainer)
    read_all(table, trainer)  # step 2 is due once weights 1 are read
    assert batches(table) == {step: [0, 1, 2, 3] for step in (0, 1, 2)}
    assert table.count_cells(table.subjects.column("dropped")) == 0
    metrics = trainer.figures
    assert (metrics["step"], metrics["staleness"], metrics["stale_rows"]) == (2, 2, ROWS)
    assert 0 < metrics["weight"] <= 2
    assert metrics["abs_delta"] > 0
    assert metrics["ratio_p1"] <= metrics["ratio_p50"] <= metrics["ratio_p99"] <= metrics["max_ratio"]


WRONG = "tests.support.wrong_losses"


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        (
            f"surrogate={WRONG}.of_samples",
            r"returned shape \[16\] for tokens of shape \[16, 5\]; return one value for each token",
        ),
        (f"correction.kind={WRONG}.infinite_weights", r"returned inf for 80 of 80 tokens of a micro-batch; bound"),
    ],
)
def test_wrong_function_of_the_user_stops_the_run_at_its_step(
    make_trainer: MakeTrainer, table: Table, setting: str, error: str
) -> None:
    name, _, value = setting.partition("=")
    trainer = make_trainer(f"algorithm.{setting}", "algorithm.proximal=trainer")
    put_step(table, 0, version=0)
    with pytest.raises(ConfigError, match=rf"^step 0: algorithm\.{name} = '{value}' {error}"):
        read_all(table, trainer)


def test_mismatch_is_reported_without_a_correction(make_trainer: MakeTrainer, table: Table) -> None:
    trainer = make_trainer()
    put_step(table, 0, version=0)
    read_all(table, trainer)
    assert {"abs_delta", "k3", "ratio", "max_ratio", "ratio_p1", "ratio_p50", "ratio_p99"} <= trainer.figures.keys()
    assert trainer.figures["stale_rows"] == 0
    assert trainer.figures["grad_norm"] > 0


def test_step_reports_the_means_of_reward_components(make_trainer: MakeTrainer, table: Table) -> None:
    trainer = make_trainer()
    put_step(table, 0, version=0)
    read_all(table, trainer)
    found = {name: value for name, value in trainer.figures.items() if name.startswith("reward/")}
    assert found == {"reward/answer": 1.0, "reward/style": 0.375}


def test_step_waits_for_the_column_of_the_proximal_policy(make_trainer: MakeTrainer, table: Table) -> None:
    settings = ("algorithm.proximal=actor_fwd", "algorithm.correction.kind=importance")
    trainer = make_trainer(*settings)
    put_step(table, 0, version=0)
    read_all(table, trainer)
    assert batches(table) == {}
    for index in range(ROWS):
        trajectory = table.fetch(table.subject(RowId(0, index), "trajectory"), Trajectory)
        assert trajectory is not None
        table.put(table.subject(RowId(0, index), "actor_fwd"), trajectory.logprobs + np.float32(0.5))
    read_all(table, trainer)
    assert batches(table) == {0: [0, 1, 2, 3]}
    assert trainer.figures["weight"] == pytest.approx(np.exp(0.5), rel=1e-5)
    # A new incarnation replays the step with the same column and computes the same weights.
    other = make_trainer(*settings, incarnation=2)
    assert other.engine.fingerprint() == fingerprint(table, 1)


@pytest.mark.parametrize("wrong", [lambda t: t.logprobs[1:], lambda t: t.logprobs * np.nan, lambda _: {"no": "array"}])
def test_column_that_does_not_fit_its_trajectory_quarantines_the_row(
    make_trainer: MakeTrainer, table: Table, wrong: Callable[[Trajectory], Any]
) -> None:
    trainer = make_trainer("algorithm.proximal=actor_fwd")
    put_step(table, 0, version=0, actor_fwd=wrong)
    read_all(table, trainer)
    assert batches(table) == {}
    quarantined = table.fetch(table.subject(RowId(0, 2), "quarantined"), Quarantined)
    assert quarantined is not None
    assert "column actor_fwd" in quarantined.error


def test_corrected_step_is_replayed_to_the_same_bits(make_trainer: MakeTrainer, table: Table) -> None:
    settings = (*CORRECTED, "algorithm.reject.kind=geometric")
    trainer = make_trainer(*settings)
    for step in (0, 1):
        put_step(table, step, version=0)
    read_all(table, trainer)
    assert trainer.figures["rejected"] > 0
    other = make_trainer(*settings, incarnation=2)
    assert other.engine.fingerprint() == fingerprint(table, 2)


def test_row_sampled_with_other_weights_than_the_published_is_quarantined(
    make_trainer: MakeTrainer, table: Table
) -> None:
    trainer = make_trainer("staleness.max=1")
    put_step(table, 0, version=0)
    read_all(table, trainer)
    known = {version: fingerprint(table, version) for version in (0, 1)}
    other = known | {1: "0" * 32}

    def sampled_by(known: dict[int, str], versions: list[int]) -> Callable[[Trajectory], Trajectory]:
        def changed(trajectory: Trajectory) -> Trajectory:
            of_tokens = np.resize(np.array(versions, np.int32), len(trajectory.versions))
            return replace(trajectory, versions=of_tokens, fingerprints=fingerprints_of(of_tokens, known))

        return changed

    # The version that wrote the wrong tokens is neither the oldest nor the only one of its row.
    put_rows(table, 1, [0], change=sampled_by(known, [0, 1]))
    put_rows(table, 1, [1], change=sampled_by(known, [1]))
    put_rows(table, 1, [2], change=sampled_by(other, [0, 1]))
    put_rows(table, 1, [3], change=sampled_by({0: known[0]}, [0, 1]))  # nothing is said of version 1
    read_all(table, trainer)
    assert batches(table) == {0: [0, 1, 2, 3]}
    quarantined = table.fetch(table.subject(RowId(1, 2), "quarantined"), Quarantined)
    assert quarantined == Quarantined(
        "trainer",
        1,
        f"the trajectory of group.1.2, written by {table.author}, has tokens of version 1 sampled with weights of "
        f"fingerprint {'0' * 32}, but weights 1 were published with {known[1]}; the actor holds weights of another run "
        "or trainer. Restart it (its process, or `relax up` again), and requeue the row",
        "",
    )
    put_rows(table, 1, [ROWS + 2], change=sampled_by(known, [0, 1]))
    read_all(table, trainer)
    assert sorted(batches(table)[1]) == [0, 1, 3, ROWS + 2]
    again = make_trainer("staleness.max=1", incarnation=2)
    assert again.engine.fingerprint() == fingerprint(table, 2)


def outside_the_vocabulary(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, token_ids=trajectory.token_ids + 1000)


def refill(table: Table, trainer: Trainer, rows: int) -> None:
    """Write malformed rows of step 0, each in the slot of its predecessor, beginning with index 1."""
    for index in (index for index in range(2 * rows) if index % ROWS):
        put_rows(table, 0, [index], change=outside_the_vocabulary)
        read_all(table, trainer)


def test_run_stops_if_the_first_rows_are_all_malformed(make_trainer: MakeTrainer, table: Table) -> None:
    with pytest.raises(AllRowsFailedError, match=r"^the first 8 rows of role trainer .*same error"):
        refill(table, make_trainer(), 8)
    assert table.count_cells(table.subjects.column("quarantined")) == 8


@pytest.mark.parametrize("settings", [(), ("run.deterministic=true",)])
def test_usable_row_of_an_incomplete_step_keeps_the_run_up(
    make_trainer: MakeTrainer, table: Table, settings: tuple[str, ...]
) -> None:
    trainer = make_trainer(*settings)
    put_rows(table, 0, [0])
    read_all(table, trainer)
    refill(table, trainer, 8)
    assert batches(table) == {}
    assert table.count_cells(table.subjects.column("quarantined")) >= 8


TWO_ROWS = "trainer.max_tokens_per_microbatch=64"


@pytest.mark.parametrize(("deterministic", "order"), [("true", [0, 1, 2, 3]), ("false", [2, 3, 0, 1])])
def test_step_starts_before_its_last_row_arrives(
    make_trainer: MakeTrainer, table: Table, deterministic: str, order: list[int]
) -> None:
    settings = (
        TWO_ROWS,
        f"run.deterministic={deterministic}",
        "algorithm.kl.place=loss",
        "algorithm.kl.coefficient=0.1",
    )
    trainer = make_trainer(*settings)
    computed = []
    for index in (2, 3, 0, 1):
        put_rows(table, 0, [index])
        read_all(table, trainer)
        computed.append(len(trainer.engine._trained.measured))
    assert batches(table) == {0: order}
    assert computed == [0, 0, 0 if deterministic == "true" else 1, 0]
    metrics = trainer.figures
    assert (metrics["early_seconds"] > 0) == (deterministic == "false")
    assert 0 <= metrics["early_seconds"] < metrics["train_seconds"]
    assert (metrics["micro_batches"], metrics["tokens"]) == (2, ROWS * SAMPLES * TOKENS)
    other = make_trainer(*settings, "trainer.stream=false", incarnation=2)
    assert other.engine.fingerprint() == fingerprint(table, 1)


def test_step_without_streaming_computes_the_same_weights(make_trainer: MakeTrainer, table: Table) -> None:
    trainer = make_trainer(TWO_ROWS, "trainer.stream=false")
    for index in range(ROWS):
        assert not trainer.engine._trained.measured
        put_rows(table, 0, [index])
        read_all(table, trainer)
    assert trainer.figures["early_seconds"] == 0
    other = make_trainer(TWO_ROWS, incarnation=2)
    assert other.engine.fingerprint() == fingerprint(table, 1)


def test_row_that_ends_after_it_was_computed_on_is_not_trained(make_trainer: MakeTrainer, table: Table) -> None:
    trainer = make_trainer(TWO_ROWS)
    put_rows(table, 0, [0, 1, 2])
    read_all(table, trainer)
    assert len(trainer.engine._trained.measured) == 1
    table.put(table.subject(RowId(0, 0), "quarantined"), Quarantined("test", 1, "on purpose", ""))
    put_rows(table, 0, [3, ROWS])
    read_all(table, trainer)
    assert batches(table) == {0: [4, 1, 2, 3]}
    other = make_trainer(TWO_ROWS, incarnation=2)
    assert other.engine.fingerprint() == fingerprint(table, 1)
