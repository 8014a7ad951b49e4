"""`relax eval`, `relax compare` and `relax samples` on models of real runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relax_actors.evaluation.models import model_folder
from tests.support.running import SUPPORT, relax

STAGES = SUPPORT / "tiny_stages.toml"
HELD_OUT = (
    "stages.grpo.eval.rows=8",
    "stages.grpo.eval.reward=tiny_tasks.share_of_sevens",
    "stages.grpo.eval.category=i",
    "stages.grpo.eval.data.kind=python",
    "stages.grpo.eval.data.function=tiny_tasks.make",
    "stages.grpo.eval.data.size=8",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_models_of_all_stages_are_scored_and_compared_on_the_same_prompts(tmp_path: Path) -> None:
    short = ("stages.sft.run.steps=2", "stages.grpo.run.steps=2")
    trained = relax("up", str(STAGES), *HELD_OUT, *short, "--quiet", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    command = [sys.executable, "-m", "relax_actors.cli.main", "eval", "stages", str(STAGES), *HELD_OUT, *short]
    scored = subprocess.run(
        [*command, "--quiet", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
    )
    assert scored.returncode == 0, scored.stderr
    scores = json.loads(scored.stdout.splitlines()[-1])
    assert list(scores) == ["base", "sft", "grpo"]
    assert all(0 <= score <= 1 for score in scores.values())

    # The run evaluated its first and its last version: the models before and after the stage grpo.
    evaluation = {name: _evaluation(tmp_path, name, scored.stderr) for name in scores}
    for name, version in (("sft", 0), ("grpo", 2)):
        found = relax("compare", f"stages-grpo@{version}", evaluation[name], "--json", cwd=tmp_path)
        assert found.returncode == 0, found.stderr
        result = json.loads(found.stdout)["sets"]["held_out"]
        assert result["prompts"] == 8
        assert result["reward"]["difference"] == pytest.approx(0, abs=1e-6)
        assert result["reward"]["b"] == pytest.approx(scores[name], abs=1e-4)
        assert len(result["categories"]) == 8

    shown = relax("samples", "stages-grpo", "--held-out", "2", "--json", cwd=tmp_path)
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [row["row"] for row in rows] == [f"eval.2.{index}" for index in range(8)]
    missing = relax("samples", "stages-grpo", "--held-out", "1", cwd=tmp_path)
    assert missing.returncode == 2
    assert "versions that it has: 0, 2" in missing.stderr

    # Copies of the model are removed from an evaluation; its answers stay.
    folder = tmp_path / "runs" / evaluation["sft"]
    assert not (folder / "model").exists()
    assert not (folder / "store").exists()
    assert model_folder(str(tmp_path / "runs" / "stages-grpo")).name == "model"


def _evaluation(folder: Path, name: str, said: str) -> str:
    """Return the folder's name of an evaluation, which the command has printed."""
    line = next(line for line in said.splitlines() if line.startswith(f"{name}: all answers are in "))
    path = folder / line.removeprefix(f"{name}: all answers are in ")
    return path.parents[1].name
