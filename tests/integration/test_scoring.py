"""Reference and ActorFwd on a real server, with a trainer that publishes their weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from broker.codec import plain_value
from broker.subjects import RowId
from broker.table import Table
from relax_actors.errors import ConfigError, RowError
from relax_actors.messages import Weights
from relax_actors.roles import make_role
from relax_actors.roles.trainer import Trainer
from relax_actors.runtime import Role, Row
from tests.integration.test_trainer import batches, fingerprint, put_step, read_all
from tests.support.contexts import MakeContext, MakeTrainer
from tests.support.messages import assert_says

BOTH = (
    "roles.reference.replicas=1",
    "roles.actor_fwd.replicas=1",
    "algorithm.kl.place=loss",
    "algorithm.kl.coefficient=0.1",
    "algorithm.proximal=actor_fwd",
    "algorithm.correction.kind=importance",
    "trainer.learning_rate=1e-2",
)


MakeScorer = Callable[..., Role]


@pytest.fixture
def make_scorer(make_context: MakeContext, request: pytest.FixtureRequest) -> MakeScorer:
    def make(name: str, *settings: str) -> Role:
        context = make_context(name, *settings)
        role = make_role(context.config, name)
        role.context = context
        role.setup()
        request.addfinalizer(role.close)
        return role

    return make


def rows_of(table: Table, step: int, indices: range = range(4)) -> list[Row]:
    rows = []
    for index in indices:
        cell = table.get(table.subject(RowId(step, index), "trajectory"))
        assert cell is not None
        rows.append(Row(RowId(step, index), {"trajectory": cell.data}, table.store))
    return rows


def score(table: Table, role: Role, step: int) -> list[np.ndarray]:
    """Handle a step's rows with a scoring role, write its column and return the values."""
    found: list[np.ndarray] = role.handle_many(rows_of(table, step))
    for index, value in enumerate(found):
        table.put(table.subject(RowId(step, index), role.writes), value)
    return found


def test_step_waits_for_both_columns_and_is_replayed_with_them(
    make_trainer: MakeTrainer, make_scorer: MakeScorer, table: Table
) -> None:
    trainer = make_trainer(*BOTH)
    reference, actor_fwd = make_scorer("reference", *BOTH), make_scorer("actor_fwd", *BOTH)
    for step in (0, 1, 2):
        put_step(table, step, version=step)
        read_all(table, trainer)
        assert step not in batches(table)
        first = score(table, reference, step)
        read_all(table, trainer)
        assert step not in batches(table)
        second = score(table, actor_fwd, step)
        for a, b, row in zip(first, second, rows_of(table, step), strict=True):
            assert a.shape == b.shape == row.trajectory.logprobs.shape
            assert a.dtype == b.dtype == np.float32
        moved = max(float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True))
        assert (moved == 0) if step == 0 else (moved > 1e-3)
        assert (reference.metrics()["version"], actor_fwd.metrics()["version"]) == (0, step)
        read_all(table, trainer)
        assert step in batches(table)
        # The newest weights are the weights before the step, so the trainer's own log-probs equal the column.
        assert (trainer.figures["kl"] > 1e-4) == (step > 0)
    other = make_trainer(*BOTH, incarnation=2)
    assert other.engine.fingerprint() == fingerprint(table, 3)


def test_deterministic_run_scores_one_row_at_a_time(make_scorer: MakeScorer) -> None:
    assert make_scorer("reference", *BOTH, "roles.reference.max_concurrent_rows=5").row_limit() == 5
    assert make_scorer("reference", *BOTH, "run.deterministic=true").row_limit() == 1


def test_malformed_row_gets_its_error_and_the_others_are_scored(
    make_trainer: MakeTrainer, make_scorer: MakeScorer, table: Table
) -> None:
    make_trainer(*BOTH)
    put_step(table, 0, version=0)
    role = make_scorer("reference", *BOTH, "trainer.max_tokens_per_microbatch=7")
    put_step(table, 0, version=1, first=4)
    errors = role.handle_many(rows_of(table, 0, range(1)))
    assert [type(error) for error in errors] == [RowError]
    assert_says(errors[0], "8 tokens", "trainer.max_tokens_per_microbatch")
    role = make_scorer("reference", *BOTH)
    scored, error = role.handle_many([*rows_of(table, 0, range(1)), *rows_of(table, 0, range(4, 5))])
    assert scored.shape == (20,)
    assert_says(error, "version of a token", "from 0 to 0")


def train_to(trainer: Trainer, table: Table, last: int, *columns: Role) -> None:
    for step in range(trainer.version, last):
        put_step(table, step, version=step)
        for role in columns:
            score(table, role, step)
        read_all(table, trainer)


def shard_of(table: Table, version: int) -> Path:
    known = table.fetch(table.subjects.numbered("weights", version), Weights)
    assert known is not None
    return table.store.path(known.shards[0].path)


KL = ("roles.reference.replicas=1", "algorithm.kl.place=loss", "algorithm.kl.coefficient=0.1")


@pytest.mark.parametrize("damage", ["gone", "flipped", "short"])
def test_version_0_survives_collection_and_damage_or_loss_of_its_file(
    make_trainer: MakeTrainer, make_scorer: MakeScorer, table: Table, damage: str
) -> None:
    trainer = make_trainer(*KL)
    first = make_scorer("reference", *KL)
    train_to(trainer, table, 8, first)
    shard = shard_of(table, 0)
    assert shard.exists()
    assert not shard_of(table, 2).exists()
    expected = first.handle_many(rows_of(table, 7))
    original = shard.read_bytes()
    if damage == "gone":
        shard.unlink()
        # The new incarnation of the trainer starts at version 8 and has never loaded version 0.
        trainer = make_trainer(*KL, incarnation=2)
        assert shard.read_bytes() == original
        shard.unlink()
    else:
        shard.write_bytes(original[:-1] + bytes([original[-1] ^ 1]) if damage == "flipped" else original[:100])
    late = make_scorer("reference", *KL)
    found: list[np.ndarray] = []
    scoring = threading.Thread(target=lambda: found.extend(late.handle_many(rows_of(table, 7))))
    scoring.start()
    while scoring.is_alive():
        trainer.idle()
        scoring.join(0.05)
    assert shard.read_bytes() == original
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_version_0_lost_in_both_places_is_an_error_that_names_them(make_trainer: MakeTrainer, table: Table) -> None:
    trainer = make_trainer(*KL)
    kept = next(trainer.context.folder.reference.glob("model*.safetensors"))
    shard = shard_of(table, 0)
    shard.unlink()
    data = bytearray(kept.read_bytes())
    data[-1] ^= 1
    kept.write_bytes(data)
    with pytest.raises(ConfigError, match=r"weights 0 .*fingerprint"):
        trainer.idle()
    kept.unlink()
    with pytest.raises(ConfigError, match=r"weights 0 are gone .*reference; restore"):
        trainer.idle()


def test_version_0_is_collected_without_a_reference_role(make_trainer: MakeTrainer, table: Table) -> None:
    trainer = make_trainer("algorithm.kl.place=loss", "algorithm.kl.coefficient=0.1")
    train_to(trainer, table, 6)
    assert not shard_of(table, 0).exists()
    assert not trainer.context.folder.reference.exists()
    assert trainer.figures["kl"] > 0


def test_reference_column_is_plain_data_for_any_role(
    make_trainer: MakeTrainer, make_scorer: MakeScorer, table: Table
) -> None:
    trainer = make_trainer(*KL)
    train_to(trainer, table, 1, make_scorer("reference", *KL))
    cell = table.get(table.subject(RowId(0, 1), "reference"))
    assert cell is not None
    value = plain_value(table.read_envelope(cell.data))
    assert (value.dtype, value.shape) == (np.float32, (20,))


def test_squares_are_those_of_the_model_at_the_newest_weights(
    make_trainer: MakeTrainer, make_scorer: MakeScorer, table: Table
) -> None:
    settings = ("roles.squares.replicas=1", "algorithm.advantage=optimal_token", "algorithm.scale=none")
    trainer = make_trainer(*settings)
    put_step(table, 0, version=0)
    read_all(table, trainer)
    squares = make_scorer("squares", *settings)
    rows = rows_of(table, 0)
    found = squares.handle_many(rows)
    assert squares.metrics()["version"] == 1
    for row, one in zip(rows, found, strict=True):
        assert (one.shape, one.dtype) == (row.trajectory.logprobs.shape, np.float32)
        # At least that of a uniform distribution, and at least the squared probability of any one token.
        assert (one > 1 / 14).all()
        assert (one < 1).all()


REFRESHED = (
    "roles.reference.replicas=1",
    "roles.actor_fwd.replicas=1",
    "algorithm.reference_every=2",
    "algorithm.kl.place=loss",
    "algorithm.proximal=actor_fwd",
    "trainer.learning_rate=1e-2",
    "staleness.max=1",
)


def test_refreshed_reference_scores_a_step_with_its_version_whatever_is_newer(
    make_trainer: MakeTrainer, make_scorer: MakeScorer, table: Table
) -> None:
    trainer, reference = make_trainer(*REFRESHED), make_scorer("reference", *REFRESHED)
    newest, scored = make_scorer("actor_fwd", *REFRESHED), {}
    for step in range(7):
        put_step(table, step, version=step)
        scored[step] = score(table, reference, step)
        score(table, newest, step)
        read_all(table, trainer)
    assert reference.metrics()["version"] == 4  # step 6 is admitted from version 5 on
    # Rows of several steps together, by another actor, with newer weights published: as before, row by row.
    again = make_scorer("reference", *REFRESHED).handle_many([*rows_of(table, 6), *rows_of(table, 4)])
    for before, after in zip([*scored[6], *scored[4]], again, strict=True):
        np.testing.assert_allclose(after, before, atol=1e-5)
    plain = (*REFRESHED[:2], *REFRESHED[3:])
    fixed = make_scorer("reference", *plain).handle_many(rows_of(table, 6))
    assert max(float(np.abs(a - b).max()) for a, b in zip(fixed, scored[6], strict=True)) > 1e-3


@pytest.mark.parametrize("restarts", [False, True])
def test_lost_file_of_a_refreshed_reference_is_rewritten(
    make_trainer: MakeTrainer, make_scorer: MakeScorer, table: Table, *, restarts: bool
) -> None:
    settings = (*REFRESHED[:2], "algorithm.reference_every=4", *REFRESHED[3:])
    trainer, reference = make_trainer(*settings), make_scorer("reference", *settings)
    newest, expected = make_scorer("actor_fwd", *settings), []
    for step in range(7):
        put_step(table, step, version=step)
        expected = score(table, reference, step)
        score(table, newest, step)
        read_all(table, trainer)
    shard = shard_of(table, 4)  # neither version 0 nor the latest
    original = shard.read_bytes()
    shard.write_bytes(original[:100])
    if restarts:
        make_trainer(*settings, incarnation=2)
    else:
        trainer.idle()
    assert shard.read_bytes() == original
    found = make_scorer("reference", *settings).handle_many(rows_of(table, 6))
    for before, after in zip(expected, found, strict=True):
        np.testing.assert_array_equal(before, after)
    kept = trainer.context.folder.references
    assert [folder.name for folder in kept.iterdir()] == ["4"]
