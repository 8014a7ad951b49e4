"""A run in a job of a real Slurm: the rendered script on two nodes, whose processes and nodes are killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from relax_actors.isolation import proc
from relax_actors.runtime.run_folder import RunFolder
from tests.support.guarded import free_port
from tests.support.running import ON_POLICY, TINY, Run, relax, wait_until
from tests.support.slurm import SlurmCluster, needs_slurm

NAME = "batched"
SAME = ("weights_fingerprint", "admitted", "trained", "dropped", "quarantined", "in_flight")
SETTINGS = (
    f"run.name={NAME}",
    "run.steps=120",
    "trainer.checkpoint_every=20",
    "reward.function=tiny_tasks.gated_share_of_sevens",
    "reward.deadline=600",
    *ON_POLICY,
)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file: the job makes steps as long as it exists."""
    gate = tmp_path / "gate"
    gate.touch()
    monkeypatch.setenv("GATE", str(gate))
    return gate


@pytest.fixture
def slurm(tmp_path: Path, gate: Path) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path / "slurm")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def step_of(folder: Path) -> int:
    """The last step of a run, -1 before the first."""
    found = relax("status", str(folder), "--json", cwd=Path.cwd())
    return int(json.loads(found.stdout)["step"] or -1) if found.returncode == 0 else -1


def submit(slurm: SlurmCluster, folder: Path) -> str:
    """Submit a job on two nodes; return its number."""
    options = ("--nodes", "2x0", "--role", "rollout=1", "--port", str(free_port()))
    rendered = relax("slurm", str(TINY), *SETTINGS, *options, cwd=folder)
    assert rendered.returncode == 0, rendered.stderr
    (folder / "job.sh").write_text(rendered.stdout)
    return slurm.ask("sbatch", "--parsable", "job.sh", cwd=folder)


def kill(job: str, *words: str) -> None:
    """Kill the process of a job whose command line has these words."""
    mark = f"SLURM_JOB_ID={job}".encode()
    commands = {pid: proc.command(pid) for pid in proc.processes() if mark in proc.environment(pid)}
    (pid,) = (pid for pid, line in commands.items() if set(words) <= {w.decode().rpartition("/")[2] for w in line})
    os.kill(pid, signal.SIGKILL)


@needs_slurm
@pytest.mark.slow
@pytest.mark.timeout(700)
def test_job_outlives_its_processes_and_a_node_and_ends_with_the_same_weights(
    slurm: SlurmCluster, gate: Path, tmp_path: Path
) -> None:
    job = submit(slurm, tmp_path)
    folder = RunFolder(tmp_path / "runs" / NAME).root
    stands = partial(slurm.is_job, job)
    wait_until(lambda: "rollout.1000 ready" in relax("tree", str(folder), cwd=tmp_path).stdout, "the second node", 120)
    reached = step_of(folder)
    kill(job, "nats-server")
    wait_until(lambda: step_of(folder) > reached + 2, "steps after the broker's death", 60)
    reached = step_of(folder)
    kill(job, "relax", "up")
    wait_until(lambda: step_of(folder) > reached + 2, "steps after the death of relax up", 90)
    gate.unlink()  # the first node goes on alone until Slurm misses the second one
    slurm.kill_node("n2")
    wait_until(lambda: stands("JobState=PENDING"), "the job in the queue again", 90)
    gate.touch()
    slurm.start_node("n2")
    slurm.ask("scontrol", "update", f"jobid={job}", "StartTime=now")
    wait_until(lambda: stands("JobState=COMPLETED") or stands("JobState=FAILED"), "the end of the job", 200)
    log = (tmp_path / f"relax-{NAME}-{job}.log").read_text()
    assert stands("JobState=COMPLETED"), log
    assert stands("Restarts=1")
    (tmp_path / "alone").mkdir()
    alone = Run(tmp_path / "alone", NAME, list(SETTINGS[1:])).complete(200)
    summary = json.loads(RunFolder(folder).summary.read_text())
    assert {name: summary[name] for name in SAME} == {name: alone[name] for name in SAME}


@needs_slurm
@pytest.mark.slow
@pytest.mark.timeout(700)
def test_job_near_its_time_limit_is_requeued_and_goes_on(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path)
    folder = RunFolder(tmp_path / "runs" / NAME)
    stands = partial(slurm.is_job, job)
    wait_until(lambda: step_of(folder.root) > 20, "a checkpoint", 200)
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: stands("JobState=PENDING"), "the job in the queue again", 60)
    slurm.ask("scontrol", "update", f"jobid={job}", "StartTime=now")
    wait_until(lambda: stands("JobState=RUNNING"), "the job again", 60)
    # In order, and for good.
    reached = step_of(folder.root)
    wait_until(lambda: step_of(folder.root) > max(20, reached), "steps of the second turn", 200)
    slurm.ask("scancel", "--batch", "--signal=TERM", job)
    wait_until(lambda: stands("JobState=FAILED"), "the end of the job", 60)
    assert stands("Restarts=1")
    assert "stopped at step" in (tmp_path / f"relax-{NAME}-{job}.log").read_text()
