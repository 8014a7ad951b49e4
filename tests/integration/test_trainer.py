"""Trainer on a real server with a tiny real model: staleness, proximal policy, streaming, checkpoints, lost files."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.subjects import RowId
from broker.table import Table
from relax_actors.engines.torch.backend import TorchTrainingBackend
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.errors import AllRowsFailedError, ConfigError
from relax_actors.messages import Checkpoint, Dropped, Quarantined, Trajectory, Weights
from relax_actors.messages.samples import fingerprints_of
from relax_actors.roles.trainer import Trainer
from relax_actors.training.step_feed import minibatches
from relax_actors.training.step_rows import StepReader
from tests.support.contexts import MakeContext, MakeTrainer
from tests.support.messages import assert_says
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


@pytest.mark.parametrize("file", ["optimizer.safetensors", "reference.safetensors"])
def test_checkpoint_with_a_flipped_bit_is_not_loaded(make_trainer: MakeTrainer, table: Table, file: str) -> None:
    settings = ("trainer.checkpoint_every=1", "algorithm.kl.place=loss", "algorithm.kl.coefficient=0.1")
    trainer = make_trainer(*settings)
    put_step(table, 0, version=0)
    read_all(table, trainer)
    checkpoint = table.fetch_last("checkpoint", Checkpoint)
    assert checkpoint is not None
    path = trainer.context.folder.root / checkpoint.path / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"file {file} of .* is not what was written there"):
        make_trainer(*settings, incarnation=2)


def checkpoints(table: Table) -> list[int]:
    return [cell_id.step for cell_id, _ in table.snapshot([table.subjects.numbered("checkpoint", "*")])]


ASYNC_CHECKPOINTS = ("trainer.checkpoint_every=1", "trainer.async_checkpoints=true", "staleness.max=0")


def test_pending_checkpoint_is_published_after_the_next_step(make_trainer: MakeTrainer, table: Table) -> None:
    trainer = make_trainer(*ASYNC_CHECKPOINTS)
    put_step(table, 0, version=0)
    read_all(table, trainer)
    assert (trainer.version, checkpoints(table)) == (1, [0])
    # An incarnation that ends here leaves an unpublished folder: the next resumes from the previous checkpoint.
    other = make_trainer(*ASYNC_CHECKPOINTS, incarnation=2)
    assert other.version == 1
    put_step(table, 1, version=1)
    read_all(table, other)
    assert (other.version, checkpoints(table)) == (2, [0, 1])
    put_step(table, 2, version=2)
    read_all(table, other)
    assert checkpoints(table) == [0, 1, 2]
    found = table.fetch_last("checkpoint", Checkpoint)
    assert found is not None
    assert found.fingerprint == fingerprint(table, 2)
    third = make_trainer(*ASYNC_CHECKPOINTS, incarnation=3)
    assert third.engine.fingerprint() == fingerprint(table, 3)
    folder = third.context.folder.checkpoints
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == ["1.2", "2.2"]


def test_full_disk_gives_up_a_pending_checkpoint_and_the_next_is_written_synchronously(
    make_trainer: MakeTrainer, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(*ASYNC_CHECKPOINTS)

    def begin_save(folder: Path) -> Callable[[], None]:
        (folder / "half").write_bytes(b"half")

        def finish() -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        return finish

    monkeypatch.setattr(trainer.engine, "begin_save", begin_save)
    for step in range(2):
        put_step(table, step, version=step)
        read_all(table, trainer)
    assert (trainer.version, checkpoints(table)) == (2, [0, 2])
    assert [path.name for path in trainer.context.folder.checkpoints.iterdir() if "1." in path.name[:3]] == []


def test_weight_file_lost_right_after_its_write_is_rewritten(
    make_trainer: MakeTrainer, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    store = trainer.context.table.store
    write = store.write_together

    def vanishing(uris: Sequence[str], save: Callable[..., Any]) -> Any:
        result = write(uris, save)
        for uri in uris:
            if uri.startswith("weights/1."):
                store.path(uri).unlink()
        return result

    monkeypatch.setattr(store, "write_together", vanishing)
    put_step(table, 0, version=0)
    read_all(table, trainer)
    published = table.fetch(table.subjects.numbered("weights", 1), Weights)
    assert published is not None
    (shard,) = published.shards
    path = table.store.path(shard.path)
    assert not path.exists()
    trainer.idle()
    assert not path.exists()
    monkeypatch.undo()
    trainer.idle()
    assert path.stat().st_size >= shard.nbytes > 0


def test_kept_steps_have_their_rows_and_a_checkpoint_at_or_before_the_first(
    make_trainer: MakeTrainer, table: Table
) -> None:
    trainer = make_trainer("run.keep_steps=3", "trainer.checkpoint_every=2", "run.steps=9")
    for step in range(7):
        put_step(table, step, version=step)
        read_all(table, trainer)
    folder = trainer.context.folder.checkpoints
    assert sorted(path.name for path in folder.iterdir()) == ["2.1", "4.1", "6.1"]
    trainer.close()  # sweeps the table a last time
    newest = table.fetch_last("checkpoint", Checkpoint)
    assert newest is not None
    assert (newest.version, newest.floor) == (6, 2)
    kept = {step: table.count_cells(f"{table.subjects.prefix}.group.{step}.*.trajectory") for step in range(7)}
    assert kept == {0: 0, 1: 0, **dict.fromkeys(range(2, 7), ROWS)}
