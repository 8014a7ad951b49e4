"""`relax simulate` with real processes, a real broker and simulated engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_actors.config import load_config
from relax_actors.errors import ConfigError
from relax_actors.monitoring.connection import connected
from relax_actors.monitoring.recorded import WARMUP_SHARE, read_metrics, with_recorded
from tests.support.running import SUPPORT, Run, processes_of, relax

CLUSTER = SUPPORT / "cluster.toml"


def libraries_of(pid: int) -> set[str]:
    """Names of the files that a process has mapped; empty if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {Path(line.split(maxsplit=5)[5]).name for line in lines if len(line.split(maxsplit=5)) > 5}


@pytest.mark.slow
def test_prediction_of_a_cluster_does_not_load_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "relax_actors.cli.main", "simulate", str(CLUSTER), "--json"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    seen: dict[int, set[str]] = {}
    while process.poll() is None:
        for pid in processes_of(tmp_path):
            seen[pid] = libraries_of(pid) | seen.get(pid, set())
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    colocated, separate = json.loads(out.splitlines()[-1])["modes"]
    assert (colocated["mode"], separate["mode"]) == ("colocated", "separate, max 1")
    assert (colocated["trainer_devices"], separate["trainer_devices"]) == (4, 2)
    # Lower bounds: a step trains for 80 device seconds and, colocated, switches for 5 s.
    assert colocated["step_seconds"] > 80 / 4 + 5
    assert separate["step_seconds"] > 80 / 2 * 0.99
    assert colocated["staleness_max"] == 0
    assert separate["staleness_max"] <= 1
    assert 0 <= separate["trainer_idle_share"] < colocated["trainer_idle_share"] < 1
    assert colocated["ratio"] == 1.0
    # Each run has a root, two nodes, a broker and at least seven actors.
    assert len(seen) > 15
    assert not any(name.startswith("libtorch") for names in seen.values() for name in names)
    assert not list(tmp_path.glob("relax-simulate-*")), "the runs' folders are left behind"


def test_config_without_simulate_section_is_refused(tmp_path: Path) -> None:
    done = relax("simulate", str(SUPPORT / "tiny.toml"), cwd=tmp_path)
    assert done.returncode == 2
    assert "needs a section [simulate]" in done.stderr


@pytest.mark.slow
def test_phases_are_taken_from_a_recorded_run(make_run: Callable[..., Run]) -> None:
    run = make_run("recorded", "run.steps=8", config=CLUSTER)
    assert run.complete()["trained"] == 32
    root = str(run.folder.root)
    settings = [f"simulate.generation.row.recorded={root}", f"simulate.training.step.recorded={root}"]
    config = with_recorded(load_config(CLUSTER, settings))
    assert config.simulate is not None
    row, step = config.simulate.generation.row, config.simulate.training.step
    assert row is not None
    assert step is not None
    assert row.values is not None
    assert step.values is not None
    with connected(root) as at:
        steps = [body["train_seconds"] for body in read_metrics(at.table, "trainer", "step")]
        rows = [body["seconds"] for body in read_metrics(at.table, "rollout", "generated")]
    assert len(steps) == 8
    rows = rows[int(WARMUP_SHARE * len(rows)) :]
    assert (step.values[0], step.values[-1]) == pytest.approx((min(steps), max(steps)), abs=1e-4)
    assert min(steps) >= 80 / 2 * 0.01
    assert (row.values[0], row.values[-1]) == pytest.approx((min(rows), max(rows)), abs=1e-4)
    with pytest.raises(ConfigError, match="switch cannot be taken from a recorded run"):
        with_recorded(load_config(CLUSTER, [f'simulate.phases.switch={{ recorded = "{root}" }}']))


@pytest.mark.slow
def test_run_for_gpus_is_predicted_with_the_times_of_a_cluster(tmp_path: Path) -> None:
    folder = SUPPORT.parents[1] / "examples"
    files = (str(folder / "cluster/qwen3_4b_async.toml"), "--times", str(folder / "simulate/qwen3_4b_16_h800.toml"))
    settings = ("trainer.prompts_per_step=8", "simulate.time_scale=0.004", "simulate.steps=2", "--json")
    done = relax("simulate", *files, *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    modes = json.loads(done.stdout.splitlines()[-1])["modes"]
    assert [mode["mode"] for mode in modes] == ["colocated", "separate, max 0", "separate, max 2"]
    assert [mode["rollout_devices"] for mode in modes[1:]] == [8, 8]
    assert all(mode["step_seconds"] > 0 for mode in modes)
