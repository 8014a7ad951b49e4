"""Distillation survives kills: the same weights bit for bit, with a frozen teacher and with the live policy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.subjects import RowId
from relax_actors.messages import Trajectory
from relax_actors.roles.taught_rollout import is_taught
from tests.support.faults import story_of, wait_for_cell
from tests.support.kills import kill_actors, kill_at, stopped_root
from tests.support.models import random_model
from tests.support.running import ON_POLICY, TINY, Run, trained_weights

MakeRun = Callable[..., Run]
PLAIN = '[data]\nkind = "python"\nfunction = "tiny_tasks.make"\nsize = 500\n'
SOURCE = 'kind = "python"\nfunction = "tiny_tasks.make"\n'
MIXED = f'[data]\nkind = "mixture"\n[data.mixture.few]\n{SOURCE}size = 40\n[data.mixture.many]\n{SOURCE}size = 60\n'
LIVE = ("roles.teacher.hint='{answer}{prompt}'", *ON_POLICY)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "settings",
    [
        ("algorithm.distil.place=advantage",),
        ("algorithm.distil.place=loss", "algorithm.distil.kind=jsd", "algorithm.distil.top_k=3"),
    ],
    ids=["advantage", "loss"],
)
def test_kills_of_teacher_and_trainer_do_not_change_the_weights(make_run: MakeRun, settings: tuple[str, ...]) -> None:
    first = make_run("first", *ON_POLICY)
    undistilled = trained_weights(first)
    # A frozen teacher: the model that the first run trained.
    frozen = f"roles.teacher.model={first.folder.model}"
    for name, options in (("live", LIVE), ("frozen", (frozen, *ON_POLICY))):
        expected = trained_weights(make_run(f"calm-{name}", *settings, *options))
        assert expected != undistilled
        run = make_run(f"killed-{name}", *settings, *options).start()
        kills = [
            ("group.0.0.trajectory", "teacher.0"),
            ("batch.1", "trainer.0"),
            ("group.3.1.teacher", "teacher.0"),
            ("group.4.0.teacher", "trainer.0"),
            ("weights.6", "teacher.0"),
        ]
        kill_actors(run, kills)
        code, result, said = run.finish()
        assert code == 0, said
        assert result["weights_fingerprint"] == expected
        assert (result["admitted"], result["trained"]) == (32, 32)
        assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
        assert story_of(run).of("replay_diverged") == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_teachers_of_a_mixture_end_with_the_same_weights(make_run: MakeRun, tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(TINY.read_text().replace(PLAIN, MIXED))
    shutil.copy(TINY.with_name("tiny_tasks.py"), tmp_path)
    one, other = (random_model(tmp_path / name, seed) for seed, name in enumerate(("one", "other")))

    def taught(name: str, few: Path, many: Path) -> Run:
        teachers = f"roles.teacher.models={{ few = '{few}', many = '{many}' }}"
        settings = ("algorithm.name=opd", teachers, "run.steps=4", "rollout.group_size=2")
        return make_run(name, *settings, *ON_POLICY, config=path)

    expected = taught("calm", one, other).complete()["weights_fingerprint"]
    assert expected != taught("exchanged", other, one).complete()["weights_fingerprint"]
    run = taught("killed", one, other).start()
    kills = [
        ("group.0.0.trajectory", "teacher.0"),
        ("batch.1", "trainer.0"),
        ("group.2.1.teacher", "teacher.0"),
    ]
    kill_actors(run, kills)
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == expected
    assert (result["admitted"], result["trained"], result["in_flight"]) == (16, 16, 0)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_run_on_samples_of_teacher_and_student_ends_with_the_same_weights(
    make_run: MakeRun, tmp_path: Path
) -> None:
    distil = "algorithm.distil={place='loss', kind='forward_kl', top_k=3, student_share=0.5}"
    teacher = f"roles.teacher.model={random_model(tmp_path / 'teacher', 1)}"
    settings = ("algorithm.name=opd", teacher, distil, *ON_POLICY)
    expected = make_run("calm", *settings).complete_healthy()["weights_fingerprint"]
    run = make_run("killed", *settings, "trainer.checkpoint_every=100").start()
    kills = [
        ("group.0.0.prompt", "rollout.0"),
        ("batch.1", "trainer.0"),
        ("group.2.1.trajectory", "teacher.0"),
        ("group.3.1.trajectory", "rollout.0"),
        ("weights.5", "rollout.0"),
        ("weights.7", "trainer.0"),
    ]
    wait_for_cell(run, "group.0.0.prompt")
    config, written = run.folder.load_config(), dict[RowId, Trajectory]()
    with stopped_root(run):
        for cell, actor in kills:
            kill_at(run, actor, cell)
        for cell_id, stored in run.table.snapshot([run.table.subjects.column("trajectory")]):
            written[cell_id.row] = run.table.read(stored.data, Trajectory)
    by_teacher = {row: is_taught(config, row.step, row.index) for row in written}
    assert set(by_teacher.values()) == {True, False}
    # No version of the run sampled the teacher's tokens.
    assert {row: not trajectory.fingerprints for row, trajectory in written.items()} == by_teacher
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == expected
    assert (result["admitted"], result["trained"], result["in_flight"]) == (32, 32, 0)
    assert story_of(run).of("replay_diverged") == []
