"""Lost files, and kills at the very end: the loss is reported and repaired, and no tensor is ever wrong."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from relax_actors.messages import Quarantined
from tests.support.faults import has_written, story_of, wait_for_cell, wait_for_path
from tests.support.kills import kill_at, stopped_root
from tests.support.running import Run, wait_until

MakeRun = Callable[..., Run]


@pytest.mark.slow
def test_run_ends_although_the_trainer_is_killed_in_its_last_step(make_run: MakeRun) -> None:
    run = make_run("lastkill").start()
    wait_for_cell(run, "batch.6")
    with stopped_root(run):
        kill_at(run, "trainer.0", "batch.7")
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["steps"], result["trained"]) == (8, 32)


@pytest.mark.slow
def test_weights_lost_with_the_store_are_rewritten(make_run: MakeRun) -> None:
    run = make_run("loststore", "trainer.checkpoint_every=2").start()
    wait_until(lambda: run.table.get("relax.loststore.batch.4"), "batch.4", 90)
    run.disconnect()
    assert run.process is not None
    run.process.terminate()
    assert run.finish(60)[0] == 0
    shutil.rmtree(run.folder.root / "store")
    code, result, said = run.start().finish()
    assert code == 0, said
    assert result["trained"] == 32
    assert result["dropped"] == 0


@pytest.mark.slow
def test_run_without_its_broker_store_is_refused_and_keeps_its_checkpoints(make_run: MakeRun) -> None:
    run = make_run("lostbroker", "supervision.intensity=1", "trainer.checkpoint_every=2", "run.steps=100").start()
    wait_until(lambda: run.table.get("relax.lostbroker.checkpoint.4"), "checkpoint.4", 90)
    run.disconnect()
    assert run.process is not None
    run.process.terminate()
    assert run.finish(60)[0] == 0
    before = sorted(p.name for p in run.folder.checkpoints.iterdir())
    shutil.rmtree(run.folder.broker / "store")
    code, _, said = run.start().finish(60)
    assert code == 1
    assert "that the table does not know" in said
    assert sorted(p.name for p in run.folder.checkpoints.iterdir()) == before


@pytest.mark.slow
def test_only_the_row_that_kills_its_actor_is_quarantined(make_run: MakeRun) -> None:
    run = make_run(
        "neighbours",
        "reward.function=tiny_tasks.poison_segfault",
        "trainer.prompts_per_step=16",
        "trainer.checkpoint_every=100",
        "supervision.intensity=100",
        "supervision.backoff_max=0.2",
        "supervision.ack_wait=1",
        "run.steps=3",
    ).start()
    wait_until(lambda: run.table.get("relax.neighbours.batch.2"), "batch.2", 110)
    column = run.table.subjects.column("quarantined")
    poisoned = {str(c.row) for c, _ in run.table.snapshot([column])}
    for cell_id, cell in run.table.snapshot([column]):
        assert "SIGSEGV" in run.table.read(cell.data, Quarantined).error
        prompt = run.table.get(run.table.subject(cell_id.row, "prompt"))
        assert prompt is not None
        assert run.table.read_envelope(prompt.data).fields["metadata"]["i"] % 11 == 0
    assert poisoned
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["trained"] == 48


@pytest.mark.slow
def test_killed_zygote_costs_restarts_only(make_run: MakeRun) -> None:
    run = make_run("zygote", "run.steps=12", "supervision.ack_wait=1").start()
    wait_until(lambda: run.table.get("relax.zygote.batch.3"), "batch.3", 90)
    trainer = wait_until(lambda: run.pid_of("trainer.0"), "trainer")
    parent = int(Path(f"/proc/{trainer}/stat").read_text().rsplit(")", 1)[1].split()[1])
    assert b"supervision.zygote" in Path(f"/proc/{parent}/cmdline").read_bytes()
    os.kill(parent, signal.SIGKILL)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["admitted"], result["trained"]) == (48, 48)
    causes = [event["reason"] for event in story_of(run).of("crashed")]
    assert len(causes) >= 2
    assert {reason.rpartition(" ")[0] for reason in causes} == {"killed with zygote"}


@pytest.mark.slow
def test_checkpoint_whose_writer_died_before_publishing_is_removed(make_run: MakeRun) -> None:
    run = make_run("unpublished", "run.steps=40", "trainer.checkpoint_every=1", "supervision.intensity=50").start()
    wait_for_cell(run, "batch.1")
    trainer, orphans = run.pid_of("trainer.0"), []
    assert trainer is not None
    known = {path.name for path in run.folder.checkpoints.iterdir()}
    while not orphans:

        def new() -> Path | None:
            found = (p for p in run.folder.checkpoints.glob("[1-9]*") if p.name not in known)
            return next(found, None)

        path = wait_for_path(new, "a new checkpoint", 30)
        os.kill(trainer, signal.SIGKILL)
        known.add(path.name)
        if run.table.get(f"relax.unpublished.checkpoint.{path.name.split('.')[0]}") is None:
            orphans.append(path)
        else:
            trainer = wait_until(lambda old=trainer: (p := run.pid_of("trainer.0")) != old and p, "a new trainer")
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["trained"] == 160
    named = [Path(cell.path).name for _, cell in sorted(story_of(run).values("checkpoint").items())[-2:]]
    assert sorted(path.name for path in run.folder.checkpoints.iterdir()) == sorted(named)


def has_held_out_rows(run: Run, version: int) -> bool:
    """Whether the evaluation of a version has begun."""
    begun = run.table.count_cells(f"relax.{run.name}.eval.{version}.*.prompt")
    return begun > 0 or has_written(run, f"evaluation.{version}")


@pytest.mark.slow
def test_killed_evaluator_repeats_its_requests_and_every_version_is_evaluated(make_run: MakeRun) -> None:
    run = make_run(
        "evaluator",
        "eval.rows=6",
        "eval.every=2",
        "eval.reward=tiny_tasks.share_of_sevens",
        "eval.data.kind=python",
        "eval.data.function=tiny_tasks.make",
        "eval.data.size=20",
        "supervision.intensity=50",
        "supervision.ack_wait=1",
    ).start()
    wait_for_cell(run, "weights.0")
    with stopped_root(run):
        for version in (0, 2, 4, 6, 8):
            wait_for_cell(run, f"weights.{version}")
            if version % 4 == 0:
                wait_until(partial(has_held_out_rows, run, version), "a held-out prompt", 60)
            kill_at(run, "evaluator.0", f"weights.{version}")
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["trained"] == 32
    story = story_of(run)
    assert len([event for event in story.of("crashed") if event["role"] == "evaluator"]) >= 4
    scored = {version: cell["rows"] for version, cell in story.values("evaluation").items()}
    assert scored == dict.fromkeys((0, 2, 4, 6, 8), 6)
