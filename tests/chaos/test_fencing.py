"""Fencing: an actor that resumes after its replacement took over does no harm, and the trainer exits."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faults import Story, box, has_written, host_by_hand, story_of, wait_for_cell
from tests.support.kills import stopped_root
from tests.support.running import Run, wait_until

MakeRun = Callable[..., Run]
STEPS = 26
SETTINGS = (
    "staleness.max=0",
    "run.deterministic=true",
    f"run.steps={STEPS}",
    "reward.function=tiny_tasks.slow_share_of_sevens",
    "rollout.max_tokens=24",
    "trainer.max_tokens_per_microbatch=64",
    "trainer.checkpoint_every=2",
    "supervision.heartbeat=600",
    "supervision.intensity=50",
    "supervision.ack_wait=1",
)
FENCED = re.compile("this (is )?incarnation")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Fingerprint of the undisturbed run."""
    return str(Run(tmp_path_factory.mktemp("calm"), "calm", list(SETTINGS)).complete()["weights_fingerprint"])


def in_a_step(run: Run, step: int) -> bool:
    return has_written(run, f"batch.{step}") and not has_written(run, f"weights.{step + 1}")


def in_a_checkpoint(run: Run, step: int) -> bool:
    found = list(run.folder.checkpoints.glob(".*.tmp"))
    return bool(found) and not has_written(run, f"checkpoint.{found[0].name.split('.')[1]}")


def waiting_for_rows(run: Run, step: int) -> bool:
    return box(run, "trainer.0").waiting_for.startswith("rows of step") and not has_written(run, f"batch.{step}")


MOMENTS: dict[str, tuple[Callable[[Run, int], object], Callable[[Run, int], bool]]] = {
    "step": (lambda run, step: has_written(run, f"batch.{step}"), in_a_step),
    "checkpoint": (lambda run, _: list(run.folder.checkpoints.glob(".*.tmp")), in_a_checkpoint),
    "rows": (lambda run, step: has_written(run, f"group.{step}.0.trajectory"), waiting_for_rows),
}


def stop_in(run: Run, actor: str, moment: str) -> int:
    """Stop an actor at a moment of its work, in this step or a later one; return its pid."""
    comes, holds = MOMENTS[moment]
    for step in range(3, 15):
        wait_until(lambda step=step: comes(run, step), f"{moment} {step}", 60)
        pid = run.kill(actor, signal.SIGSTOP)
        if holds(run, step):
            return pid
        os.kill(pid, signal.SIGCONT)
    raise AssertionError(f"{actor} was never found in {moment}")


def last_batch(run: Run) -> int:
    return max((int(s.rsplit(".", 1)[1]) for s in run.table.list_subjects(f"relax.{run.name}.batch.*")), default=-1)


def later_than(story: Story, sequence: int, author: str) -> list[str]:
    return [f"{c.kind}.{c.step}.{c.index}.{c.field}" for c, at, by, _ in story.cells if at > sequence and by == author]


def is_there(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("moment", ["step", "checkpoint", "rows"])
def test_trainer_that_resumes_after_its_replacement_took_over_exits(
    make_run: MakeRun, undisturbed: str, moment: str
) -> None:
    run = make_run(f"zombie{moment}", *SETTINGS).start()
    zombie = stop_in(run, "trainer.0", moment)
    stopped_at = last_batch(run)
    with host_by_hand(run, "trainer") as successor:
        # The floor must pass the rows that the stopped actor still believes in.
        wait_for_cell(run, f"weights.{stopped_at + 8}")
        wait_until(lambda: story_of(run).floor > stopped_at + 2, "floor above the stopped step", 60)
        before = story_of(run)
        end = max(sequence for _, sequence, _, _ in before.cells)
        os.kill(zombie, signal.SIGCONT)
        wait_until(lambda: not Path(f"/proc/{zombie}/cmdline").exists(), "end of the replaced actor")
        # The node knows only the stopped process and starts a third incarnation, which fences the second.
        wait_until(lambda: successor.poll() is not None, "end of the successor", 60)
    crashes = [e for e in story_of(run).of("crashed") if e["role"] == "trainer"]
    assert len(crashes) == 1, [(c["reason"], c["traceback"]) for c in crashes]
    assert FENCED.search(crashes[0]["reason"] + crashes[0]["traceback"])
    with stopped_root(run):
        wait_for_cell(run, f"weights.{STEPS}")
        assert later_than(story_of(run), end, "trainer.0#1") == []
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == undisturbed
    assert (result["admitted"], result["trained"]) == (4 * STEPS, 4 * STEPS)
    story = story_of(run)
    assert later_than(story, end, "trainer.0#1") == []
    assert story.strays() == []
    assert story.of("replay_diverged") == []
    newest = sorted(story.values("checkpoint").items())[-2:]
    assert [is_there(run.folder.root / cell.path) for _, cell in newest] == [True, True]
    kept = {Path(cell.path).name for _, cell in newest}
    assert {path.name for path in run.folder.checkpoints.iterdir()} == kept


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("role", ["rollout", "prompts"])
def test_replaced_actor_of_another_role_that_resumes_changes_nothing(
    make_run: MakeRun, undisturbed: str, role: str
) -> None:
    run = make_run(f"zombie{role}", *SETTINGS).start()
    wait_for_cell(run, "group.4.0.prompt")
    zombie = run.kill(f"{role}.0", signal.SIGSTOP)
    stopped_at = last_batch(run)
    with host_by_hand(run, role):
        wait_for_cell(run, f"weights.{stopped_at + 8}")
        wait_until(lambda: story_of(run).floor > stopped_at + 2, "floor above the stopped step", 60)
        os.kill(zombie, signal.SIGCONT)
        wait_for_cell(run, f"weights.{stopped_at + 14}")
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == undisturbed
    assert (result["admitted"], result["trained"], result["in_flight"]) == (4 * STEPS, 4 * STEPS, 0)
    story = story_of(run)
    assert len(story.values("batch")) == STEPS
    assert story.strays() == []
