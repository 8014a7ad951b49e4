"""Teacher on a real server: a frozen model, and the live policy with a hint; steps that wait for it and replay it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from broker.subjects import RowId
from broker.table import Table
from relax_actors.engines.protocols import TrainSample
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.engines.torch.scorer import TorchTeacher
from relax_actors.errors import RowError
from relax_actors.messages import Prompt, Quarantined, TeacherScores
from relax_actors.roles import make_role
from relax_actors.roles.teacher import Teacher
from relax_actors.runtime import Row
from relax_actors.weights import files as weights
from tests.support.contexts import MakeContext, MakeTrainer
from tests.support.messages import assert_says
from tests.support.steps import ROWS, SAMPLES, TOKENS, batches, fingerprint, put_step, read_all

ADVANTAGE = ("algorithm.distil.place=advantage", "trainer.learning_rate=1e-2")
LOSS = ("algorithm.distil.place=loss", "algorithm.distil.top_k=4", "trainer.learning_rate=1e-2")
MakeTeacher = Callable[..., Teacher]


@pytest.fixture
def make_teacher(make_context: MakeContext, tmp_path: Path, request: pytest.FixtureRequest) -> MakeTeacher:
    """Make a teacher; `folder=True` writes a model folder with weights of its own."""

    def make(*settings: str, folder: bool = False) -> Teacher:
        if folder:
            model = make_context("teacher", *settings, "roles.teacher.replicas=1").config.model_path
            shutil.copytree(model, tmp_path / "other", dirs_exist_ok=True)
            tensors = {name: tensor * 3 for name, tensor in tensors_of(build(model, seed=7)).items()}
            weights.save(tensors, tmp_path / "other" / "model.safetensors")
            settings = (*settings, f"roles.teacher.model={tmp_path / 'other'}")
        context = make_context("teacher", "roles.teacher.replicas=1", *settings)
        role = make_role(context.config, "teacher")
        assert isinstance(role, Teacher)
        role.context = context
        role.setup()
        request.addfinalizer(role.close)
        return role

    return make


def rows_of(table: Table, role: Teacher, step: int) -> list[Row]:
    rows = []
    for index in range(ROWS):
        row = RowId(step, index)
        cells = {name: table.get(table.subject(row, name)) for name in role.inputs(role.context.config)}
        rows.append(Row(row, {name: cell.data for name, cell in cells.items() if cell is not None}, table.store))
    return rows


def teach(table: Table, role: Teacher, step: int) -> list[TeacherScores]:
    found = role.handle_many(rows_of(table, role, step))
    for index, value in enumerate(found):
        table.put(table.subject(RowId(step, index), "teacher"), value)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        ADVANTAGE,
        ("algorithm.distil.place=loss", "trainer.learning_rate=1e-2"),
        (*LOSS, "algorithm.distil.kind=forward_kl"),
        (*LOSS, "algorithm.distil.kind=jsd", "algorithm.distil.tail=renormalise"),
    ],
    ids=["advantage", "sampled reverse KL", "forward KL", "JSD"],
)
def test_step_waits_for_the_teacher_and_replays_it(
    make_trainer: MakeTrainer, make_teacher: MakeTeacher, table: Table, settings: tuple[str, ...]
) -> None:
    undistilled = make_trainer("trainer.learning_rate=1e-2")
    trainer = make_trainer("roles.teacher.replicas=1", *settings)
    teacher = make_teacher(*settings, folder=True)
    for step in (0, 1):
        put_step(table, step, version=step)
        read_all(table, trainer)
        assert step not in batches(table)
        (first, *_) = teach(table, teacher, step)
        assert first.logprobs.shape == (SAMPLES * TOKENS,)
        assert (first.top_ids is None) == ("algorithm.distil.top_k=4" not in settings)
        read_all(table, trainer)
        assert step in batches(table)
    assert trainer.figures["teacher_kl"] != 0
    assert ("distil" in trainer.figures) == ("algorithm.distil.place=loss" in settings)
    replayed = make_trainer("roles.teacher.replicas=1", *settings, incarnation=2)
    assert replayed.engine.fingerprint() == fingerprint(table, 2)
    assert undistilled.engine.fingerprint() != fingerprint(table, 2)


def test_frozen_teacher_scores_with_its_own_weights(make_teacher: MakeTeacher, table: Table, tmp_path: Path) -> None:
    role = make_teacher(*LOSS, folder=True)
    put_step(table, 0, version=0)
    (row, *_) = rows_of(table, role, 0)
    (scores, *_) = role.handle_many([row])
    alone = TorchTeacher(role.context.config, tmp_path / "other")
    trajectory = row.trajectory
    samples = [
        TrainSample.of_completion(trajectory.prompt_tokens, part) for part in np.split(trajectory.token_ids, SAMPLES)
    ]
    expected = alone.score_top(samples, 4, lambda: None)
    assert np.array_equal(scores.logprobs, np.concatenate([found.logprobs[3:] for found in expected]))
    assert np.array_equal(scores.top_ids, np.concatenate([found.top_ids for found in expected]))
    assert role.metrics() == {"scored_tokens": SAMPLES * TOKENS}


def test_live_policy_with_a_hint_is_its_own_teacher(
    make_trainer: MakeTrainer, make_teacher: MakeTeacher, table: Table
) -> None:
    hint = "roles.teacher.hint='{answer}{digit}{prompt}'"
    trainer = make_trainer("roles.teacher.replicas=1", hint, *ADVANTAGE)
    teacher = make_teacher(hint, *ADVANTAGE)
    prompt = np.array([1, 2, 10], np.int32)
    for index in range(ROWS):
        cell = Prompt("12>", prompt, "45", {"digit": 7}, 0, 0)
        table.put(table.subject(RowId(0, index), "prompt"), cell)
    put_step(table, 0, version=0)
    (row, *_) = rows_of(table, teacher, 0)
    (scores, *_) = teach(table, teacher, 0)
    engine = teacher._engine
    hinted = np.array([4, 5, 7, 1, 2, 10], np.int32)
    samples = [TrainSample.of_completion(hinted, part) for part in np.split(row.trajectory.token_ids, SAMPLES)]
    expected = np.concatenate([found[6:] for found in engine.score(samples, lambda: None)])
    np.testing.assert_allclose(scores.logprobs, expected, atol=1e-6)
    read_all(table, trainer)
    assert 0 in batches(table)
    assert teacher.metrics()["version"] == 0


def test_row_without_what_the_hint_names_or_with_too_long_a_hint_is_refused(
    make_trainer: MakeTrainer, make_teacher: MakeTeacher, table: Table
) -> None:
    make_trainer()
    put_step(table, 0, version=0)
    unknown = make_teacher("roles.teacher.hint='{solution}{prompt}'", *ADVANTAGE)
    (error, *_) = unknown.handle_many(rows_of(table, unknown, 0))
    assert isinstance(error, RowError)
    assert_says(error, "roles.teacher.hint", "['solution']", "['answer', 'prompt']")
    long = make_teacher(f"roles.teacher.hint='{'1' * 90}{{prompt}}'", *ADVANTAGE)
    (error, *_) = long.handle_many(rows_of(table, long, 0))
    assert str(error).startswith("with its hint the teacher reads 98 tokens in a sequence, more than the ")


def test_scores_that_do_not_fit_the_row_are_quarantined(make_trainer: MakeTrainer, table: Table) -> None:
    trainer = make_trainer("roles.teacher.replicas=1", *LOSS)
    total = SAMPLES * TOKENS
    ids, logprobs = np.full((total, 4), 99, np.int32), np.zeros((total, 4), np.float32)
    bad = {
        0: TeacherScores(np.zeros(3, np.float32)),
        1: TeacherScores(np.zeros(total, np.float32)),
        2: TeacherScores(np.zeros(total, np.float32), ids, logprobs),
    }
    put_step(table, 0, version=0)
    for index in range(ROWS):
        value = bad.get(index, TeacherScores(np.zeros(total, np.float32), ids * 0, logprobs))
        table.put(table.subject(RowId(0, index), "teacher"), value)
    read_all(table, trainer)
    said = [table.fetch(table.subject(RowId(0, index), "quarantined"), Quarantined) for index in range(3)]
    assert [row.error if row else "" for row in said] == [
        "column teacher has 3 log-probs for 20 tokens",
        "column teacher has top_ids of shape None; algorithm.distil needs [20, 4]",
        "column teacher names tokens outside of the model's vocabulary of 13",
    ]
