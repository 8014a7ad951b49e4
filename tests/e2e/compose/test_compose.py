"""`docker compose up` trains to the end, whatever is killed, cut off, added or taken away meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from tests.e2e.compose.conftest import IMAGE, Project
from tests.support.running import wait_until

MakeProject = Callable[..., Project]
SHORT = "run.steps={} eval.rows=16 eval.every=1000 trainer.checkpoint_every=20"
SERVICES = ("prompts", "rollout", "reward", "advantages", "trainer")


def say(what: str) -> None:
    print(f"compose: {what}", flush=True)  # noqa: T201 make compose-test shows what it did


@pytest.mark.timeout(280)
def test_it_trains_to_the_end(make_project: MakeProject) -> None:
    project = make_project(SHORT.format(60))
    project.up()
    project.await_step(1)
    say(f"first step {time.monotonic() - project.began:.1f} s after up")
    for container in project.compose("ps", "-q").split():
        inspected = json.loads(project.docker("inspect", container))[0]
        host, user = inspected["HostConfig"], inspected["Config"]["User"]
        assert host["ReadonlyRootfs"], inspected["Name"]
        assert host["CapDrop"] == ["ALL"], inspected["Name"]
        assert not host["CapAdd"], inspected["Name"]
        assert user.split(":")[0] not in ("", "0", "root"), inspected["Name"]
    summary = project.summary(200)
    assert summary["steps"] == 60
    assert summary["trained"] == 60 * 16
    assert (project.folder / "runs" / "demo" / "model" / "config.json").exists()
    said = wait_until(
        lambda: "finished" in (text := project.compose("logs", "monitor")) and text, "the monitor's end", 30
    )
    assert "step 60/60" in said
    size = json.loads(project.docker("image", "inspect", IMAGE))[0]["Size"]
    say(f"image {size / 1e9:.2f} GB; trained {summary['trained']} rows")
    assert size < 2.5e9
    seeds = project.compose("exec", "-T", "nats", "sh", "-c", "cat /keys/*/nats.creds /keys/private/keys.json")
    secrets = [
        word.strip('",') for word in seeds.split() if word.strip('",')[:2] in ("SU", "SO", "SA") and len(word) > 50
    ]
    assert len(secrets) > 10
    logs = project.compose("logs")
    history = project.docker("history", "--no-trunc", IMAGE)
    assert not any(secret in logs or secret in history for secret in secrets)


@pytest.mark.timeout(295)
def test_every_container_may_be_killed(make_project: MakeProject) -> None:
    project = make_project(SHORT.format(100_000))
    project.up()
    at = project.await_step(3)
    for service in (*SERVICES, "nats"):
        project.kill(service)
        at = project.await_step(at + 3, 60)
        say(f"{service} killed and started: step {at}")
        project.assert_ledger_holds()


@pytest.mark.timeout(295)
def test_a_container_may_be_cut_off_and_others_come_and_go(make_project: MakeProject) -> None:
    project = make_project(SHORT.format(100_000))
    project.up()
    at = project.await_step(3)
    (rollout,) = project.containers("rollout")
    network = f"{project.name}_default"
    project.docker("network", "disconnect", network, rollout)
    time.sleep(30)
    project.docker("network", "connect", "--alias", "rollout", network, rollout)
    at = project.await_step(at + 3, 60)
    say(f"rollout cut off for 30 s and back: step {at}")
    project.assert_ledger_holds()
    began = time.monotonic()
    project.up("--scale", "rollout=3", "--no-recreate")
    wait_until(lambda: rollouts(project) == 3, "three rollouts", 60)
    say(f"three rollouts {time.monotonic() - began:.1f} s after scale")
    project.up("--scale", "rollout=1", "--no-recreate")
    wait_until(lambda: rollouts(project) == 1, "one rollout", 60)
    at = project.await_step(project.step() + 3, 60)
    say(f"scaled down: step {at}")
    project.assert_ledger_holds()


def rollouts(project: Project) -> int:
    actors = project.relax("status", "demo")["actors"]
    return sum(name.startswith("rollout.") and lease.get("waits_for") != "setup" for name, lease in actors.items())


@pytest.mark.timeout(295)
def test_a_run_survives_the_loss_of_any_one_of_three_servers(make_project: MakeProject) -> None:
    project = make_project(SHORT.format(100_000), "docker-compose.yml", "deploy/nats/docker-compose.yml")
    project.up()
    at = project.await_step(3)
    for server in ("nats", "nats-2", "nats-3"):
        (container,) = project.containers(server)
        project.docker("kill", container)
        at = project.await_step(at + 3, 60)
        project.docker("start", container)
        at = project.await_step(at + 3, 60)
        say(f"server {server} killed and back: step {at}")
        project.assert_ledger_holds()
