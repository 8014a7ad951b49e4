"""`relax chaos` injects faults; the run continues, and `relax ledger` proves it, live and after the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faults import story_of
from tests.support.running import Run, relax, wait_until

MakeRun = Callable[..., Run]


@pytest.mark.slow
def test_faults_are_logged_and_the_ledger_stays_complete(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("faulty", "run.steps=3000", "supervision.intensity=50", "supervision.ack_wait=1").start()
    wait_until(lambda: run.table.get("relax.faulty.batch.2"), "batch.2", 90)
    done = relax("chaos", "faulty", "--kill", "any", "--every", "0.5", "--count", "3", "--seed", "1", cwd=tmp_path)
    assert "3 of 3 faults done" in done.stdout, done.stderr
    stopped = relax("chaos", "faulty", "--kill", "reward/0", "--every", "0.2", "--signal", "TERM", cwd=tmp_path)
    assert "1 of 1" in stopped.stdout, stopped.stderr
    live = relax("ledger", "faulty", "--json", cwd=tmp_path)
    assert live.returncode == 0, live.stdout + live.stderr
    shown = relax("tree", "faulty", cwd=tmp_path).stdout
    assert "trainer.0" in shown
    assert "waiting for" in shown or "group." in shown
    refused = relax("chaos", "faulty", "--kill", "nobody", cwd=tmp_path)
    assert refused.returncode == 2
    assert "is no target" in refused.stderr
    run.end_in_order()
    done = json.loads(relax("ledger", "faulty", "--json", cwd=tmp_path).stdout)
    steps = int(done["steps"]) + 2
    code, result, said = run.start(f"run.steps={steps}").finish()
    assert code == 0, said
    after = json.loads(relax("ledger", "faulty", "--json", cwd=tmp_path).stdout)
    assert (after["trained"], after["in_flight"], after["violations"]) == (4 * steps, 0, [])
    assert after["admitted"] == after["trained"] + after["dropped"]
    model = relax("fingerprint", str(run.folder.model), cwd=tmp_path).stdout.strip()
    assert model == result["weights_fingerprint"]
    assert "nothing is quarantined" in relax("quarantine", "list", "faulty", cwd=tmp_path).stdout


@pytest.mark.slow
def test_killed_broker_and_its_restart_are_logged_and_shown(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("unbrokered", "run.steps=3000").start()
    wait_until(lambda: run.table.get("relax.unbrokered.batch.2"), "batch.2", 90)
    # The event is stored after the broker has restarted; the command waits for that.
    broker = relax("chaos", "unbrokered", "--kill", "broker", "--every", "0.1", cwd=tmp_path)
    assert "1 of 1" in broker.stdout, broker.stderr
    assert [event["target"] for event in story_of(run).of("fault")][-1] == "broker"
    repaired = wait_until(lambda: story_of(run).of("repaired"), "event that the broker is back")
    assert [(event["role"], event["restarts"]) for event in repaired] == [("broker", 1)]
    assert [(event["role"], event["reason"]) for event in story_of(run).of("down")] == [("broker", "killed by SIGKILL")]

    def tree() -> str | None:
        text = relax("tree", "unbrokered", cwd=tmp_path).stdout
        return text if "broker, embedded ready" in text else None

    shown = wait_until(tree, "the broker in the tree", 60)
    lines = {line.strip("│├└─ ").split(" ")[0].rstrip(","): line for line in shown.splitlines()}
    assert "1 restart," in lines["broker"], shown
    assert "0 restarts" in lines["node"], shown
    assert "ready for" in lines["node"], shown
    assert "ready for" in lines["zygote"], shown
    run.end_in_order()
