"""Branches of a real run, differences of two runs, rows sampled again, and the origin of the exported model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_actors.errors import ConfigError
from relax_actors.messages import Batch
from relax_actors.monitoring.connection import connected
from relax_actors.monitoring.recorded import read_metrics
from relax_actors.replay.branch import Branch
from relax_actors.replay.recording import opened
from relax_actors.replay.rows import row_of, sample_again
from relax_actors.weights.statement import STATEMENT
from tests.support.messages import assert_says
from tests.support.running import DEADLINE, Run, relax, wait_until


def result_of(done: subprocess.CompletedProcess[str], *codes: int) -> dict[str, Any]:
    assert done.returncode in (codes or (0,)), done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def branched(run: Run, name: str, *settings: str) -> Run:
    """A branch of the run at step 4, not started yet."""
    made = relax("branch", run.name, name, *settings, "--at", "4", "--no-start", cwd=run.cwd, deadline=DEADLINE)
    assert made.returncode == 0, made.stderr
    folder = run.cwd / "runs" / name
    return Run(run.cwd, name, config=folder, at=folder)


def fingerprint_of(run: Run) -> str:
    return str(json.loads(run.folder.summary.read_text())["weights_fingerprint"])


@pytest.mark.slow
def test_branch_with_equal_settings_ends_with_the_same_weights_and_samples_its_first_step_no_more(
    kept_run: Run,
) -> None:
    result = branched(kept_run, "again").complete()
    assert (result["weights_fingerprint"], result["steps"]) == (fingerprint_of(kept_run), 8)
    assert (result["admitted"], result["trained"], result["in_flight"]) == (32, 32, 0)
    found = result_of(relax("diff", "kept", "again", "--json", cwd=kept_run.cwd, deadline=DEADLINE))
    assert (found["difference"], found["steps"], found["settings"]) == (None, {"a": 8, "b": 8, "equal": 8}, [])
    with connected(str(kept_run.cwd / "runs" / "again")) as at:
        batches = [at.table.fetch(at.table.subjects.numbered("batch", step), Batch) for step in (5, 6, 7)]
        sampled = max(metric["generated_tokens"] for metric in read_metrics(at.table, "rollout") if "version" in metric)
    assert sampled == sum(batch.tokens for batch in batches if batch is not None)


@pytest.mark.slow
def test_branch_with_another_setting_parts_at_its_step(kept_run: Run) -> None:
    branched(kept_run, "faster", "trainer.learning_rate=0.002", "run.steps=5").complete()
    found = result_of(relax("diff", "kept", "faster", "--json", cwd=kept_run.cwd, deadline=DEADLINE), 1)
    assert {change["key"] for change in found["settings"]} == {"trainer.learning_rate", "run.steps"}
    difference = found["difference"]
    assert (difference["step"], difference["tensor"]) == (4, "model.embed_tokens.weight")
    assert (found["steps"]["equal"], "row" in difference) == (4, False)
    itself = relax("diff", "kept", str(kept_run.folder.root), cwd=kept_run.cwd, deadline=DEADLINE)
    assert (itself.returncode, "are the same run" in itself.stderr) == (2, True)
    shown = relax("diff", "kept", "faster", cwd=kept_run.cwd, deadline=DEADLINE)
    assert "setting trainer.learning_rate: 0.001 -> 0.002" in shown.stdout


@pytest.mark.slow
def test_killed_branch_leaves_no_run_and_a_killed_trainer_of_one_ends_with_the_same_weights(
    kept_run: Run, tmp_path: Path
) -> None:
    runs = kept_run.cwd / "runs"
    command = [sys.executable, "-m", "relax_actors.cli.main", "branch", "kept", "killed", "--at", "4", "--no-start"]
    process = subprocess.Popen(
        command, cwd=kept_run.cwd, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL
    )
    try:
        wait_until(
            lambda: list(runs.glob(".killed.*.tmp/broker/address.json")), "a branch that is being made", DEADLINE
        )
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: not [*runs.glob("*killed*"), *tmp_path.glob("relax-*")], "removal of what was made", DEADLINE)
    run = branched(kept_run, "killed").start()
    try:
        run.kill("trainer.0")
        code, result, said = run.finish()
    finally:
        run.stop()
    assert (code, result.get("weights_fingerprint")) == (0, fingerprint_of(kept_run)), said


@pytest.mark.slow
def test_branch_that_cannot_be_made_is_refused_with_the_reason(kept_run: Run) -> None:
    runs = kept_run.cwd / "runs"
    with opened(str(kept_run.folder.root)) as recording:

        def refused(step: int, *settings: str, name: str = "new") -> str:
            with pytest.raises(ConfigError) as error:
                Branch(recording, runs / name, name, step, list(settings))
            return str(error.value)

        assert "holds a run already; choose another name" in refused(4, name="kept")
        assert_says(refused(9), "step 9", "steps 0 to 7")
        assert "trainer.prompts_per_step cannot differ in a branch" in refused(4, "trainer.prompts_per_step=2")
        assert "needs run.steps above it; run.steps is 3" in refused(4, "run.steps=3")
        assert "run.name follows from the command" in refused(4, "run.name=other")
        assert "did you mean 'cispo'?" in refused(4, "algorithm.name=cisp")
        other = Branch(recording, runs / "new", "new", 4, ["algorithm.name=cispo"]).config
        assert (other.algorithm.name, other.algorithm.surrogate) == ("cispo", "clip_weight")
    assert not (runs / "new").exists()


@pytest.mark.slow
def test_row_is_sampled_again_with_the_recorded_version_and_seed(kept_run: Run) -> None:
    same = result_of(relax("replay", "kept", "--rollout", "5.2", "--json", cwd=kept_run.cwd, deadline=DEADLINE))
    assert (same["equal"], same["version"], same["samples"]) == (True, 5, 4)
    assert same["tokens"]["recorded"] == same["tokens"]["computed"] > 0
    warm = ("--rollout", "group.5.2", "rollout.temperature=0.5", "--json")
    other = result_of(relax("replay", "kept", *warm, cwd=kept_run.cwd, deadline=DEADLINE), 1)
    assert (other["difference"]["sample"], other["equal"]) == (0, False)
    none = relax("replay", "kept", "--rollout", "70.2", cwd=kept_run.cwd, deadline=DEADLINE)
    assert (none.returncode, "run kept has no group.70.2.prompt" in none.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["run.deterministic=false"], "it is not deterministic"),
        (["rollout.backend=sglang", "rollout.sglang.urls=['http://127.0.0.1:1']"], "that the run did not start"),
    ],
)
def test_row_that_does_not_follow_from_version_and_seed_is_refused(
    kept_run: Run, settings: list[str], said: str
) -> None:
    with opened(str(kept_run.folder.root)) as recording, pytest.raises(ConfigError, match=said):
        sample_again(recording, row_of("5.2"), settings)


@pytest.mark.slow
def test_origin_of_the_model_is_signed_and_a_changed_byte_is_named(kept_run: Run, tmp_path: Path) -> None:
    valid = result_of(relax("provenance", "kept", "--check", "--json", cwd=kept_run.cwd, deadline=DEADLINE))
    (signer,) = valid.pop("signers")
    assert valid == {"model": "runs/kept/model", "valid": True, "problems": []}
    statement = result_of(relax("provenance", "kept", "--json", cwd=kept_run.cwd, deadline=DEADLINE))
    products = statement["predicate"]["runDetails"]["byproducts"]
    assert products[0]["content"]["last"] == fingerprint_of(kept_run)
    names = {each["name"] for each in statement["predicate"]["buildDefinition"]["resolvedDependencies"]}
    assert names == {"code", "package", "data"}
    shutil.copytree(kept_run.folder.model, tmp_path / "model")
    moved = ("provenance", str(tmp_path / "model"), "--check", "--json")
    unknown = result_of(relax(*moved, cwd=tmp_path, deadline=DEADLINE), 3)
    assert (unknown["valid"], unknown["problems"], unknown["signers"]) == (None, [], [signer])
    known = result_of(relax(*moved, "--key", signer["account"], cwd=tmp_path, deadline=DEADLINE))
    assert known["valid"] is True
    with (tmp_path / "model" / "model.safetensors").open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\x55")
    changed = result_of(relax(*moved, cwd=tmp_path, deadline=DEADLINE), 1)
    assert len(changed["problems"]) == 1
    assert changed["problems"][0].startswith("file model.safetensors was changed: model.")
    body = (tmp_path / "model" / STATEMENT).read_text()
    (tmp_path / "model" / STATEMENT).write_text(body.replace('"payload": "ey', '"payload": "eX'))
    forged = relax("provenance", str(tmp_path / "model"), "--check", cwd=tmp_path, deadline=DEADLINE)
    assert forged.returncode != 0
