"""Stages of a file follow one another whatever is killed, and end with the same weights."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import hit
from tests.support.messages import assert_says
from tests.support.running import ON_POLICY, SUPPORT, Run, processes_of, relax, wait_until

STAGES = SUPPORT / "tiny_stages.toml"
MakeRun = Callable[..., Run]
PAIRS = """
[[stages]]
name = "dpo"
[stages.run]
steps = 6
[stages.data]
kind = "python"
function = "tiny_tasks.pairs"
size = 64
[stages.algorithm]
name = "dpo"
[stages.trainer]
prompts_per_step = 4
[stages.roles.reference]
"""
EVERYWHERE = ("trainer.0", "trainer.0", "prompts.0", "node", "zygote", "broker")
VICTIMS = {
    "sft": (*EVERYWHERE, "examples.0", "examples.0"),
    "grpo": (*EVERYWHERE, "rollout.0", "rollout.0", "reward.0", "advantages.0"),
    "dpo": (*EVERYWHERE, "examples.0", "reference.0", "reference.0"),
}
"""Stages of the chain, and what is killed in each; besides, the command with all of its processes."""
ROWS = {"sft": 8, "grpo": 4, "dpo": 4}
"""Rows of a step of each stage."""
FAST = ("supervision.intensity=100000", "supervision.backoff_max=0.2")


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Return a file of three stages: examples, samples with a reward, and pairs."""
    path = tmp_path / "chain.toml"
    path.write_text(STAGES.read_text() + PAIRS)
    shutil.copy(SUPPORT / "tiny_tasks.py", tmp_path)
    return path


def fingerprints(result: dict[str, Any]) -> dict[str, str]:
    return {name: stage["weights_fingerprint"] for name, stage in result["stages"].items()}


def kill_all(whole: Run) -> None:
    """Kill the command itself; its actors die with it."""
    assert whole.process is not None
    whole.process.send_signal(signal.SIGKILL)
    whole.process.communicate(timeout=30)
    wait_until(lambda: processes_of(whole.cwd / "runs") == [], "end of all actors", 60)


def strike(whole: Run, part: Run, step: int, victim: str) -> None:
    """Kill a process of a stage, or with `command` everything, as soon as a step has begun."""
    wait_until(part.folder.address.exists, f"start of {part.name}", 240)
    subject = f"relax.{part.name}.batch.{step}"
    wait_until(lambda: part.table.get(subject), f"step {step} of {part.name}", 240)
    if victim != "command":
        hit(part, victim)
        return
    part.disconnect()
    kill_all(whole)
    whole.start()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [9, 30])
def test_killed_stages_end_with_the_weights_of_calm_ones(
    make_run: MakeRun, chain: Path, tmp_path: Path, kills: int
) -> None:
    source, of_stage = random.Random(kills), kills // len(VICTIMS)
    steps = 3 * of_stage + 12  # some pass between two kills, and none comes after the end
    settings = (*(f"stages.{name}.run.steps={steps}" for name in VICTIMS), *ON_POLICY)
    calm = make_run("calm", *settings, config=chain).complete()
    whole = make_run("killed", *settings, *FAST, config=chain).start()
    for stage, victims in VICTIMS.items():
        part = make_run(f"killed-{stage}", config=chain)
        struck = ["command", *source.choices(victims, k=of_stage - 1)]
        source.shuffle(struck)
        for step, victim in enumerate(struck, 1):
            strike(whole, part, step, victim)
        part.disconnect()
    code, result, said = whole.finish()
    assert code == 0, said
    assert fingerprints(result) == fingerprints(calm)
    trained = {name: (stage["admitted"], stage["trained"]) for name, stage in result["stages"].items()}
    assert trained == {name: (rows * steps, rows * steps) for name, rows in ROWS.items()}
    # The command is finished, and says so again.
    again = relax("up", str(chain), "run.name=killed", *settings, "--json", "--quiet", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert fingerprints(json.loads(again.stdout.splitlines()[-1])) == fingerprints(calm)
    # An earlier stage cannot be trained further under a later one.
    longer = relax("up", str(chain), "run.name=killed", *settings, f"stages.sft.run.steps={steps + 1}", cwd=tmp_path)
    assert longer.returncode == 2
    assert_says(" ".join(longer.stderr.split()), "sft", "grpo has begun")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fresh_stages_begin_from_nothing(make_run: MakeRun, chain: Path) -> None:
    settings = (*(f"stages.{name}.run.steps=2" for name in VICTIMS), *ON_POLICY)
    first = make_run("twice", *settings, config=chain).complete()
    other = (*settings, "run.seed=7")
    # A command that is refused removes nothing.
    refused = make_run("twice", *settings, "trainer.device=nowhere", config=chain).start("--fresh").finish()
    assert refused[0] == 2, refused
    assert fingerprints(make_run("twice", *settings, config=chain).complete()) == fingerprints(first)
    # Neither stage may resume: the settings differ.
    code, again, said = make_run("twice", *other, config=chain).start("--fresh").finish()
    assert code == 0, said
    assert fingerprints(again).keys() == fingerprints(first).keys()
    assert all(fingerprints(again)[name] != fingerprint for name, fingerprint in fingerprints(first).items())
