"""The batch script that `relax slurm` prints, without Slurm."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.running import TINY, relax_here

CPUS = ("--nodes", "2x0", "--role", "rollout=3", "--role", "reward")
RANKS = ("trainer.backend=megatron", "trainer.megatron.ranks=12", "trainer.megatron.local_ranks=6")


@pytest.mark.parametrize("options", [(), CPUS, ("--nodes", "2x8", *RANKS)])
def test_script_is_valid_bash(options: tuple[str, ...], tmp_path: Path) -> None:
    rendered = relax_here("slurm", str(TINY), *options, cwd=tmp_path)
    assert rendered.returncode == 0, rendered.stderr
    path = tmp_path / "job.sh"
    path.write_text(rendered.stdout)
    checks = [[shutil.which("bash") or "", "-n", str(path)]]
    if found := shutil.which("shellcheck"):
        checks.append([found, str(path)])
    for check in checks:
        done = subprocess.run(check, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_job_asks_for_nodes_and_gpus_of_the_placement(tmp_path: Path) -> None:
    rendered = relax_here("slurm", str(TINY), "--nodes", "2x8x80GiB", *RANKS, cwd=tmp_path)
    lines = rendered.stdout.splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --requeue"} <= set(lines)
    assert "roles=([1]=trainer_rank=6)" in lines
    assert "trainer_rank.1005" in rendered.stderr


def test_settings_are_words_of_the_script_and_no_commands(tmp_path: Path) -> None:
    text = "reward.function=$(touch harmed);`touch harmed`"
    rendered = relax_here("slurm", str(TINY), text, cwd=tmp_path)
    assert rendered.returncode == 2
    assert rendered.stdout == ""
    (tmp_path / "it's; touch harmed").mkdir()
    rendered = relax_here("slurm", str(TINY), "run.folder=it's; touch harmed/run", cwd=tmp_path)
    assert rendered.returncode == 0, rendered.stderr
    head = rendered.stdout.partition("set -euo pipefail")[0]
    echo = head + 'echo "${settings[@]}"'
    bash = shutil.which("bash") or ""
    done = subprocess.run([bash, "-euc", echo], text=True, capture_output=True, cwd=tmp_path, check=True)
    assert done.stdout == "run.folder=it's; touch harmed/run\n"
    assert not (tmp_path / "harmed").exists()


def test_idle_nodes_and_unknown_roles_are_refused(tmp_path: Path) -> None:
    idle = relax_here("slurm", str(TINY), "--nodes", "3x0", cwd=tmp_path)
    assert idle.returncode == 2
    assert "node 1 has no actor" in idle.stderr
    assert "--role rollout=1" in idle.stderr
    unknown = relax_here("slurm", str(TINY), "--nodes", "2x0", "--role", "referee", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "no role referee" in unknown.stderr
    single = relax_here("slurm", str(TINY), "--nodes", "2x0", "--role", "trainer", cwd=tmp_path)
    assert single.returncode == 2
    assert "one actor" in single.stderr
    twice = relax_here("slurm", str(TINY), "--nodes", "2x0", "--role", "rollout", "--role", "rollout=2", cwd=tmp_path)
    assert "twice" in twice.stderr
    placed = relax_here("slurm", str(TINY), "--nodes", "2x8", "--role", "rollout", "rollout.device=cuda", cwd=tmp_path)
    assert placed.returncode == 2
    assert "the placement gives GPUs" in placed.stderr
