"""Kill of `relax up`: within 5 s no process of the run is left, and the same command resumes the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faults import kill_root, port_of, process, story_of, temporary_files, wait_for_cell, wait_for_path
from tests.support.running import Run, wait_until

MakeRun = Callable[..., Run]
ON_POLICY = ("staleness.max=0", "run.deterministic=true", "supervision.ack_wait=1", "trainer.checkpoint_every=1")


def resumes(run: Run, fingerprint: str) -> None:
    """Check that the same command resumes the run and ends with these weights, a complete ledger and no leftovers."""
    result = run.complete()
    assert result["weights_fingerprint"] == fingerprint
    assert (result["admitted"], result["trained"], result["in_flight"]) == (32, 32, 0)
    assert temporary_files(run) == []
    named = [cell.path for _, cell in sorted(story_of(run).values("checkpoint").items())[-2:]]
    assert sorted(p.name for p in run.folder.checkpoints.iterdir()) == sorted(Path(path).name for path in named)


@pytest.mark.slow
def test_killed_root_leaves_no_process_and_the_run_resumes(make_run: MakeRun, undisturbed: str) -> None:
    run = make_run("rootkill", *ON_POLICY).start()
    wait_for_cell(run, "batch.1")
    port = port_of(run)
    kill_root(run)
    run.start()
    wait_for_cell(run, "batch.2")
    assert port_of(run) == port
    wait_for_path(lambda: next(run.folder.checkpoints.glob(".*.tmp"), None), "a checkpoint that is being written", 60)
    kill_root(run)
    resumes(run, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_root_killed_during_its_start_leaves_no_process_and_the_run_resumes(
    make_run: MakeRun, undisturbed: str
) -> None:
    run = make_run("startkill", *ON_POLICY)
    root = run.folder.root
    files = ["broker/address.json", "lock", "broker/nats-server.conf", "broker.json", "config.json"]
    processes = ["broker", "node", "zygote", "reward.0", "prompts.0", "rollout.0", "trainer.0"]

    def renewed(path: Path, began: float) -> Path | None:
        try:
            return path if path.stat().st_mtime >= began else None
        except FileNotFoundError:
            return None

    for name in files:
        # The second start finds the files of the first; only the first start writes the address.
        for _ in range(1 if name == "broker/address.json" else 2):
            began = time.time()
            run.start()
            wait_for_path(lambda name=name, began=began: renewed(root / name, began), name, 30)
            kill_root(run)
    for name in processes:
        run.start()
        wait_until(lambda name=name: process(run, name), name, 60)
        kill_root(run)
    resumes(run, undisturbed)
