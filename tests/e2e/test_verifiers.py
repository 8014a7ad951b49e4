"""Environments of the real package verifiers train a model; it runs in a Python environment of its own.

Set RELAX_VERIFIERS_PYTHON to a python with 'verifiers==0.3.1' and 'renderers==0.1.10', which has both APIs. With 0.4
the tests of `verifiers.v1` run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import relax_actors
from tests.e2e.test_agents import trajectories
from tests.support.gateways import AGENTS, address_of
from tests.support.running import SUPPORT, Run, relax, wait_until

MakeRun = Callable[..., Run]
PYTHON = os.environ.get("RELAX_VERIFIERS_PYTHON", "")
ROOT = Path(relax_actors.__file__).parents[1]
OLD, V1 = ("--environment", "vf_sevens"), ("--taskset", "vf_sevens_v1")
STEPS = 20
SKIPPED = (
    "RELAX_VERIFIERS_PYTHON is not set; make an environment with `pip install 'verifiers==0.3.1' 'renderers==0.1.10'` "
    "and name its python"
)


def has_old_api() -> bool:
    probe = "import verifiers, sys; sys.exit(not hasattr(verifiers, 'load_environment'))"
    return bool(PYTHON) and subprocess.run([PYTHON, "-c", probe], check=False).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason=SKIPPED),
]
old_api = pytest.mark.skipif(not has_old_api(), reason="this verifiers has no vf.load_environment")
apis = pytest.mark.parametrize(
    "which", [pytest.param(OLD, marks=old_api, id="load_environment"), pytest.param(V1, id="v1")]
)


@contextmanager
def worker(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONPATH": f"{ROOT}:{SUPPORT}"}
    command = [PYTHON, "-m", "relax_actors.serving.verifiers", *arguments]
    with subprocess.Popen(command, env=environment, text=True, stdout=-1, stderr=-1) as process:
        try:
            yield process
        finally:
            process.kill()


def rows_of(*arguments: str, path: Path) -> list[dict]:
    with worker(*arguments, "--rows", str(path)) as process:
        said, errors = process.communicate(timeout=120)
    assert (process.returncode, said) == (0, f"100 rows in {path}\n"), errors
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(900)
@apis
def test_an_environment_trains_for_20_steps_with_the_log_probs_of_the_rollout(
    make_run: MakeRun, tmp_path: Path, which: tuple[str, str]
) -> None:
    rows = rows_of(*which, path=tmp_path / "rows.jsonl")
    assert {row["index"] for row in rows} == set(range(100))
    data = ["data.kind=jsonl", f"data.path={tmp_path / 'rows.jsonl'}", "data.function=", "reward.function=environment"]
    settings = [*data, f"run.steps={STEPS}", "staleness.max=0", "trainer.checkpoint_every=100", "agent.idle_seconds=60"]
    run = make_run("verifiers", *settings, config=AGENTS).start()
    url, _ = address_of(run)
    token = run.folder.root / "gateway" / "token"
    with worker(*which, "--url", url, "--token-file", str(token), "--patience", "60") as process:
        wait_until(lambda: run.table.get(f"relax.{run.name}.batch.1") or process.poll() is not None, "batch.1", 240)
        found = trajectories(run)
        run.kill("gateway.0")
        run.disconnect()
        code, result, said = run.finish()
        process.terminate()
        errors = process.communicate(timeout=60)[1]
    assert code == 0, said + errors
    assert (result["steps"], result["trained"]) == (STEPS, 2 * STEPS), errors
    assert "VerifiersError" not in errors
    assert found
    # An empty answer ends an episode of the old API.
    turns = [count for trajectory in found for count in trajectory.metrics["turns"]]
    assert set(turns) <= {1.0, 2.0}
    assert turns.count(2.0) > len(turns) / 2
    for trajectory in found:
        assert len(trajectory.texts) == 2, "no sample has failed"
        rewards = [text.count("7") for text in trajectory.texts]
        assert [bool(reward) for reward in trajectory.metrics["environment_reward"]] == [bool(n) for n in rewards]
    said = relax("tail", f"relax.{run.name}.metric.trainer.>", "--history", cwd=run.cwd).stdout
    deltas = [float(delta) for delta in re.findall(r'"abs_delta": ([0-9.e+-]+)', said)]
    assert len(deltas) >= STEPS, said[-2000:]
    assert max(deltas) <= 1e-5, "log-probs of the trainer differ from those that the environment got"
