"""Critic on a real server with a tiny real model: values, batches, checkpoints, kills, malformed rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from broker.codec import plain_value
from broker.subjects import RowId
from broker.table import Table
from relax_actors.errors import ConfigError, FencedError
from relax_actors.messages import Checkpoint, CriticVersion, Dropped, Quarantined, Trajectory
from relax_actors.roles.critic import Critic
from relax_actors.roles.trainer import Trainer
from relax_actors.training.samples import samples_of
from tests.support.contexts import MakeContext
from tests.support.messages import assert_says
from tests.support.steps import ROWS, SAMPLES, TOKENS, batches, put_rows, put_step, read_all

SETTINGS = ("critic.learning_rate=1e-2", "run.deterministic=true", "staleness.max=0")
MakeCritic = Callable[..., Critic]


def returns(trajectory: Trajectory) -> Any:
    """Returns that a critic can learn: they follow from the token."""
    return (trajectory.token_ids / 10).astype(np.float32)


@pytest.fixture
def make_trainer(table: Table, make_context: MakeContext) -> Callable[..., Trainer]:
    def make(*settings: str, incarnation: int = 1) -> Trainer:
        trainer = Trainer()
        trainer.context = make_context("trainer", *SETTINGS, *settings, incarnation=incarnation)
        trainer.setup()
        trainer.recover(table.snapshot(trainer.follows(trainer.context.config)))
        trainer.before_save()
        return trainer

    return make


@pytest.fixture
def make_critic(table: Table, make_context: MakeContext) -> MakeCritic:
    def make(*settings: str, incarnation: int = 1) -> Critic:
        critic = Critic()
        critic.context = make_context("critic", *SETTINGS, *settings, incarnation=incarnation)
        critic.setup()
        critic.recover(table.snapshot(critic.follows(critic.context.config)))
        return critic

    return make


def advance(table: Table, critic: Critic) -> None:
    """Deliver all cells to the critic; one that it knows changes nothing."""
    critic.on_cells(table.snapshot(critic.follows(critic.context.config)))


def values_of(table: Table, step: int) -> dict[int, Any]:
    """Column `values` of the rows of a step."""
    found = {}
    for cell_id, cell in table.snapshot([table.subjects.column("values")]):
        if cell_id.step == step:
            found[cell_id.index] = np.asarray(plain_value(table.read_envelope(cell.data)))
    return found


def fingerprints(table: Table) -> list[str]:
    """Published fingerprints of the critic, by version."""
    cells = table.snapshot([table.subjects.numbered("critic", "*")])
    found = {c.step: table.read(cell.data, CriticVersion, subject=cell.subject).fingerprint for c, cell in cells}
    return [found[version] for version in sorted(found)]


def test_values_are_those_of_the_version_of_their_step(
    make_trainer: Callable[..., Trainer], make_critic: MakeCritic, table: Table
) -> None:
    trainer = make_trainer()
    critic = make_critic()
    put_step(table, 0, version=0, returns=returns)
    advance(table, critic)
    first = values_of(table, 0)
    assert first.keys() == set(range(ROWS))
    # The value head of a new critic is zero.
    assert all(values.shape == (SAMPLES * TOKENS,) and not values.any() for values in first.values())
    put_step(table, 1, version=0, returns=returns)
    advance(table, critic)
    assert values_of(table, 1) == {}  # of version 1, which needs batch 0
    read_all(table, trainer)
    assert batches(table) == {0: [0, 1, 2, 3]}
    advance(table, critic)
    second = values_of(table, 1)
    assert second.keys() == set(range(ROWS))
    prints = fingerprints(table)
    assert len(prints) == 2
    assert prints[0] != prints[1]
    trajectory = table.fetch(table.subject(RowId(1, 2), "trajectory"), Trajectory)
    assert trajectory is not None
    expected = critic.engine.values(samples_of(2, trajectory), lambda: None)
    np.testing.assert_array_equal(np.concatenate([v[3:] for v in expected]), second[2])
    metrics = critic.figures
    assert (metrics["step"], metrics["tokens"]) == (0, ROWS * SAMPLES * TOKENS)
    assert {"value_loss", "explained_variance", "value_clipped", "grad_norm", "learning_rate"} <= metrics.keys()


@pytest.mark.slow
def test_the_critic_learns_the_returns(
    make_trainer: Callable[..., Trainer], make_critic: MakeCritic, table: Table
) -> None:
    settings = ("critic.value_clip=0", "trainer.epochs=4")
    trainer, critic = make_trainer(*settings), make_critic(*settings)
    explained = []

    def token_before(trajectory: Trajectory) -> Any:
        return np.roll(trajectory.token_ids, 1).astype(np.float32) / 10 * (np.arange(SAMPLES * TOKENS) % TOKENS > 0)

    for step in range(8):
        put_step(table, step, version=step, returns=token_before)
        advance(table, critic)
        read_all(table, trainer)
        advance(table, critic)
        explained.append(critic.figures["explained_variance"])
    assert critic.figures["updates"] == 4
    assert explained[-1] > max(0.2, explained[0])


KILLS = ("in the middle of a batch", "after a batch", "in the middle of a checkpoint")


@pytest.mark.parametrize(
    ("kill", "backend"),
    [
        *((kill, "torch") for kill in KILLS),
        ("after a batch", "megatron"),
        *(pytest.param(kill, "megatron", marks=pytest.mark.slow) for kill in KILLS if kill != "after a batch"),
    ],
)
def test_killed_critic_continues_with_the_same_bits(
    make_trainer: Callable[..., Trainer], make_critic: MakeCritic, table: Table, kill: str, backend: str
) -> None:
    if backend == "megatron" and find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not installed: make megatron")
    often = "trainer.checkpoint_every=1" if "checkpoint" in kill else "trainer.checkpoint_every=100"
    settings = (often, f"critic.backend={backend}")
    trainer, critic = make_trainer(*settings), make_critic(*settings)

    def die(*_: Any) -> Any:
        raise KeyboardInterrupt

    for step in (0, 1):
        put_step(table, step, version=step, returns=returns)
        advance(table, critic)
        read_all(table, trainer)
        if step == 1 and kill != "after a batch":
            setattr(critic.engine, "step" if "batch" in kill else "save", die)
            with pytest.raises(KeyboardInterrupt):
                advance(table, critic)
        else:
            advance(table, critic)
    other = make_critic(*settings, incarnation=2)
    put_step(table, 2, version=2, returns=returns)
    advance(table, other)
    third = values_of(table, 2)
    whole = make_critic("trainer.checkpoint_every=100", f"critic.backend={backend}", incarnation=3)
    trajectory = table.fetch(table.subject(RowId(2, 0), "trajectory"), Trajectory)
    assert trajectory is not None
    expected = whole.engine.values(samples_of(0, trajectory), lambda: None)
    np.testing.assert_array_equal(np.concatenate([v[3:] for v in expected]), third[0])
    assert fingerprints(table)[2] == whole.engine.fingerprint() == other.engine.fingerprint()


def test_the_trainer_keeps_rows_that_the_checkpoint_of_the_critic_does_not_cover(
    make_trainer: Callable[..., Trainer], make_critic: MakeCritic, table: Table
) -> None:
    trainer, critic = make_trainer("trainer.checkpoint_every=2"), make_critic("trainer.checkpoint_every=4")
    for step in range(4):
        put_step(table, step, version=step, returns=returns)
        advance(table, critic)
        read_all(table, trainer)
        advance(table, critic)
    put_step(table, 4, version=4, returns=returns)  # so that step 3 is closed
    last = table.fetch_last("checkpoint", Checkpoint)
    assert last is not None
    assert (last.version, last.floor) == (4, 0)
    advance(table, critic)
    assert table.fetch_last("critic_checkpoint", Checkpoint).version == 4  # type: ignore[union-attr]
    for step in range(4, 6):
        put_step(table, step, version=step, returns=returns)
        advance(table, critic)
        read_all(table, trainer)
        advance(table, critic)
    last = table.fetch_last("checkpoint", Checkpoint)
    assert last is not None
    assert (last.version, last.floor) == (6, 4)
    assert {cell.step for cell in table.list_cells(f"{table.subjects.prefix}.group.>")} == {4, 5}


def test_policy_waits_in_the_warm_up_steps_of_the_critic(
    make_trainer: Callable[..., Trainer], make_critic: MakeCritic, table: Table
) -> None:
    settings = ("critic.warmup_steps=2", "trainer.learning_rate=1e-2")
    trainer, critic = make_trainer(*settings), make_critic(*settings)
    published = [trainer.engine.fingerprint()]
    for step in range(3):
        put_step(table, step, version=step, returns=returns)
        advance(table, critic)
        read_all(table, trainer)
        published.append(trainer.engine.fingerprint())
        assert ("grad_norm" in trainer.figures) == (step == 2)
    assert published[0] == published[1] == published[2] != published[3]
    advance(table, critic)
    assert len(set(fingerprints(table))) == 4


def test_a_critic_that_was_replaced_exits(
    make_trainer: Callable[..., Trainer], make_critic: MakeCritic, table: Table
) -> None:
    trainer, old = make_trainer(), make_critic()
    put_step(table, 0, version=0, returns=returns)
    advance(table, old)
    read_all(table, trainer)
    make_critic(incarnation=2)
    with pytest.raises(FencedError, match="critic 1 was published by a later incarnation"):
        advance(table, old)


def test_malformed_rows_are_quarantined_and_lost_ones_dropped(
    make_trainer: Callable[..., Trainer], make_critic: MakeCritic, table: Table
) -> None:
    make_trainer()
    critic = make_critic()
    put_rows(table, 0, [0], returns=returns)
    put_rows(table, 0, [1], change=lambda t: replace(t, token_ids=t.token_ids + 1000), returns=returns)
    table.put(table.subject(RowId(0, 2), "trajectory"), Quarantined("test", 1, "another type", ""))
    advance(table, critic)
    assert values_of(table, 0).keys() == {0}
    found = [table.fetch(table.subject(RowId(0, index), "quarantined"), Quarantined) for index in (1, 2)]
    assert [cell.role for cell in found if cell] == ["critic", "critic"]
    assert found[0] is not None
    assert_says(found[0].error, "tokens", "vocabulary of 13")
    assert table.fetch(table.subject(RowId(0, 1), "dropped"), Dropped) is None


def test_trainer_quarantines_rows_without_returns(
    make_trainer: Callable[..., Trainer], make_critic: MakeCritic, table: Table
) -> None:
    trainer, critic = make_trainer(), make_critic()
    put_rows(table, 0, [0])
    put_rows(table, 0, [1, 2, 3], returns=returns)
    advance(table, critic)
    read_all(table, trainer)
    found = table.fetch(table.subject(RowId(0, 0), "quarantined"), Quarantined)
    assert found is not None
    assert_says(found.error, "no returns", "critic", "role advantages")
    assert batches(table) == {}


def test_exported_critic_is_a_folder_that_another_run_starts_from(
    make_trainer: Callable[..., Trainer], make_critic: MakeCritic, table: Table, tmp_path: Path
) -> None:
    trainer, critic = make_trainer("run.steps=1"), make_critic("run.steps=1")
    put_step(table, 0, version=0, returns=returns)
    advance(table, critic)
    read_all(table, trainer)
    advance(table, critic)
    folder = critic.context.folder.critic
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
    assert model.config.num_labels == 1
    other = make_critic(f"critic.path={folder}", incarnation=2)
    assert other.engine.fingerprint() == fingerprints(table)[1]
    table.purge([table.subjects.numbered("critic_checkpoint", "*")])
    with pytest.raises(ConfigError, match=r"critic-checkpoints .*\['1\.1'\]"):
        make_critic(incarnation=3)


def test_critic_of_a_run_that_is_shortened_to_its_last_checkpoint_is_exported(
    make_trainer: Callable[..., Trainer], make_critic: MakeCritic, table: Table
) -> None:
    trainer, critic = make_trainer(), make_critic("trainer.checkpoint_every=1")
    put_step(table, 0, version=0, returns=returns)
    advance(table, critic)
    read_all(table, trainer)
    advance(table, critic)
    critic.idle()
    assert not critic.context.folder.critic.exists()
    later = make_critic("run.steps=1", incarnation=2)
    assert (later.context.folder.critic / "model.safetensors").exists()
