"""The promise: whatever is killed, an on-policy run ends with the same weights bit for bit."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_actors.messages import Trajectory
from tests.support.running import Run, processes_of, wait_until

MakeRun = Callable[..., Run]
ON_POLICY = ("staleness.max=0", "run.deterministic=true", "supervision.intensity=50", "supervision.ack_wait=1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Fingerprint of the on-policy run that nobody disturbs."""
    return str(Run(tmp_path_factory.mktemp("calm"), "calm", list(ON_POLICY)).complete()["weights_fingerprint"])


def written(run: Run, subject: str) -> bool:
    return run.table.get(f"relax.{run.name}.{subject}") is not None


def kill_at(run: Run, actor: str, subject: str) -> None:
    """Kill an actor as soon as a cell is there."""
    wait_until(lambda: written(run, subject), subject, 120)
    run.kill(actor)


@pytest.mark.timeout(400)
def test_run_with_kills_at_named_points_ends_with_the_same_weights(make_run: MakeRun, undisturbed: str) -> None:
    run = make_run("killed", *ON_POLICY).start()
    kill_at(run, "rollout.0", "group.0.0.prompt")  # before or in the middle of a generation
    kill_at(run, "trainer.0", "batch.1")  # in the middle of a step, between batch cell and weights cell
    kill_at(run, "prompts.0", "weights.2")
    kill_at(run, "advantages.0", "group.2.1.reward")
    kill_at(run, "reward.0", "group.3.0.trajectory")
    kill_at(run, "trainer.0", "weights.6")  # in the middle of a checkpoint
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == undisturbed
    assert result["restarts"] >= 5
    assert (result["admitted"], result["trained"]) == (32, 32)
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)


def test_a_crash_of_the_trainer_rolls_nothing_out_again(make_run: MakeRun) -> None:
    run = make_run("once", "staleness.max=2", "supervision.intensity=50", "trainer.checkpoint_every=100").start()
    seen: dict[str, str] = {}
    for step in (1, 3):
        kill_at(run, "trainer.0", f"batch.{step}")
        for cell_id, cell in run.table.snapshot([run.table.subjects.column("trajectory")]):
            fingerprint = run.table.read(cell.data, Trajectory).fingerprint
            assert (
                seen.setdefault(str(cell_id.row), f"{cell.sequence} {fingerprint}") == f"{cell.sequence} {fingerprint}"
            )
    wait_until(lambda: written(run, "weights.6"), "weights.6", 120)
    ledger = run.ledger()
    assert ledger.violations() == []
    trajectories = run.table.count(run.table.subjects.column("trajectory"))
    admitted = run.table.count(run.table.subjects.column("prompt"))
    assert trajectories <= admitted
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["admitted"] == result["trained"] == 32


def test_killing_the_root_leaves_nothing_and_the_run_resumes(make_run: MakeRun, undisturbed: str) -> None:
    run = make_run("rootkill", *ON_POLICY).start()
    wait_until(lambda: written(run, "batch.3"), "batch.3", 120)
    run.disconnect()
    assert run.process is not None
    run.process.send_signal(signal.SIGKILL)
    run.process.communicate()
    wait_until(lambda: not processes_of(run.folder.root), "end of all processes", 5)
    code, result, said = run.start().finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == undisturbed


def test_killing_the_node_restarts_its_actors_and_ends_with_the_same_weights(
    make_run: MakeRun, undisturbed: str
) -> None:
    run = make_run("nodekill", *ON_POLICY).start()
    wait_until(lambda: written(run, "batch.2"), "batch.2", 120)
    node = next(
        pid for pid in processes_of(run.folder.root) if b"supervision.node" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(node, signal.SIGKILL)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_run_with_random_kills_ends_with_the_same_weights(make_run: MakeRun) -> None:
    longer = (*ON_POLICY, "run.steps=40", "supervision.intensity=1000")
    undisturbed = make_run("calm", *longer).complete()["weights_fingerprint"]
    run = make_run("random", *longer).start()
    source = random.Random(7)
    roles = ["trainer.0", "rollout.0", "reward.0", "advantages.0", "prompts.0"]
    kills = 0
    while run.process is not None and run.process.poll() is None and kills < 30:
        wait_until(
            lambda: run.process is None or run.process.poll() is not None or run.pid_of("trainer.0"), "trainer", 60
        )
        actor = source.choice(roles)
        try:
            run.kill(actor)
            kills += 1
        except (AssertionError, ProcessLookupError):
            continue
        try:
            run.process.wait(source.uniform(0.5, 6.0))
        except Exception:  # noqa: BLE001, S112 still running
            continue
    code, result, said = run.finish(1200)
    assert code == 0, said
    assert result["weights_fingerprint"] == undisturbed
    assert result["trained"] == result["admitted"] - result["dropped"] - result["quarantined"]
