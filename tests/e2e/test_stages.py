"""Stages of a file follow one another whatever is killed, and end with the same weights."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import ON_POLICY, SUPPORT, Run, processes_of, relax, wait_until

STAGES = SUPPORT / "tiny_stages.toml"
MakeRun = Callable[..., Run]


@pytest.fixture
def stages(make_run: MakeRun, tmp_path: Path) -> Callable[[str], tuple[Run, list[Run]]]:
    """Return the command that trains stages, and a run for each stage to look into."""

    def make(name: str) -> tuple[Run, list[Run]]:
        whole = make_run(name, *ON_POLICY, config=STAGES)
        parts = [make_run(f"{name}-{stage}", config=STAGES) for stage in ("sft", "grpo")]
        return whole, parts

    return make


def fingerprints(result: dict[str, Any]) -> dict[str, str]:
    return {name: stage["weights_fingerprint"] for name, stage in result["stages"].items()}


def kill_all(whole: Run) -> None:
    """Kill the command itself; its actors die with it."""
    assert whole.process is not None
    whole.process.send_signal(signal.SIGKILL)
    whole.process.communicate(timeout=30)
    wait_until(lambda: processes_of(whole.cwd / "runs") == [], "end of all actors", 60)


@pytest.mark.slow
def test_killed_stages_end_with_the_weights_of_calm_ones(
    stages: Callable[[str], tuple[Run, list[Run]]], tmp_path: Path
) -> None:
    calm, _ = stages("calm")
    expected = fingerprints(calm.complete())
    whole, (sft, grpo) = stages("killed")
    for part, step in ((sft, 4), (grpo, 2)):
        whole.start()
        wait_until(
            lambda p=part, k=step: p.folder.address.exists() and p.table.get(f"relax.{p.name}.batch.{k}"),
            f"step {step} of {part.name}",
            240,
        )
        part.kill("trainer.0")
        wait_until(part.folder.address.exists, f"start of {part.name}", 240)
        for k in (step, step + 1):
            wait_until(partial(part.table.get, f"relax.{part.name}.batch.{k}"), f"step {k} of {part.name}", 240)
            if k == step:
                part.kill("trainer.0")
        part.disconnect()
        kill_all(whole)
    result = whole.complete()
    assert fingerprints(result) == expected
    assert [stage["trained"] for stage in result["stages"].values()] == [64, 24]
    # The command is finished, and says so again.
    again = relax("up", str(STAGES), "run.name=killed", *ON_POLICY, "--json", "--quiet", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert fingerprints(json.loads(again.stdout.splitlines()[-1])) == expected
    # An earlier stage cannot be trained further under a later one.
    longer = relax("up", str(STAGES), "run.name=killed", *ON_POLICY, "stages.sft.run.steps=9", cwd=tmp_path)
    assert longer.returncode == 2
    assert "sft has steps to train, but grpo has begun" in " ".join(longer.stderr.split())
