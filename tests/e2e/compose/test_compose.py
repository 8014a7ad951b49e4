"""`docker compose up` trains to the end while containers are killed, disconnected, added and removed."""

from __future__ import annotations

import datetime as dt
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.e2e.compose.conftest import IMAGE, Event, Project
from tests.support.consoles import log_of
from tests.support.messages import assert_says
from tests.support.running import relax, wait_until

MakeProject = Callable[..., Project]
SHORT = "run.steps={} eval.rows=16 eval.every=1000 trainer.checkpoint_every=20"
NO_USER_OF_THE_HOST = 65532
SERVICES = ("prompts", "rollout", "reward", "advantages", "trainer")


def say(what: str) -> None:
    print(f"compose: {what}", flush=True)  # noqa: T201 make compose-test shows what it did


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a clone to another user")
@pytest.mark.parametrize(("owner", "works_as"), [(0, NO_USER_OF_THE_HOST), (1001, 1001)])
@pytest.mark.timeout(280)
def test_it_trains_to_the_end_for_any_owner_of_the_clone(
    make_project: MakeProject, tmp_path: Path, owner: int, works_as: int
) -> None:
    project = make_project(SHORT.format(60), owner=owner)
    project.up()
    project.await_step(1)
    say(f"first step {time.monotonic() - project.began:.1f} s after up, in a clone of user {owner}")
    (prepare,) = project.compose("ps", "-a", "-q", "prepare").split()
    for container in {*project.compose("ps", "-q").split()} - {prepare}:
        assert_unprivileged(project, container, works_as)
    summary = project.summary(200)
    assert summary["steps"] == 60
    assert summary["trained"] == 60 * 16
    said = wait_until(
        lambda: "finished" in (text := project.compose("logs", "monitor")) and text, "the monitor's end", 30
    )
    assert "step 60/60" in said
    run = project.folder / "runs" / "demo"
    assert (run / "model" / "config.json").exists()
    assert {path.stat().st_uid for path in (run.parent, run, *run.rglob("*"))} == {works_as}
    assert_host_can_read(project, tmp_path)
    size = json.loads(project.docker("image", "inspect", IMAGE))[0]["Size"]
    say(f"image {size / 1e9:.2f} GB; trained {summary['trained']} rows")
    assert size < 2.5e9
    assert_no_secret_is_told(project)


def assert_unprivileged(project: Project, container: str, user: int) -> None:
    """Check that no process of a container is root or has, or could get, a capability."""
    inspected = json.loads(project.docker("inspect", container))[0]
    host, name = inspected["HostConfig"], inspected["Name"]
    assert host["ReadonlyRootfs"], name
    assert host["CapDrop"] == ["ALL"], name
    assert set(host["CapAdd"]) == {"SETUID", "SETGID", "SETPCAP"}, name
    assert "no-new-privileges:true" in host["SecurityOpt"], name
    for pid in project.docker("top", container, "-eo", "pid").split()[1:]:
        with suppress(FileNotFoundError, ProcessLookupError):  # a probe of the health check ends at once
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            status = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
            if status["Name"] != ["runc:[2:INIT]"]:
                assert set(status["Uid"]) == {str(user)}, name
                held = {int(status[key][0], 16) for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
                assert held == {0}, name


def assert_host_can_read(project: Project, tmp_path: Path) -> None:
    """Check that the commands of the message work: copy the credentials, then read through the published port."""
    run = str(project.folder / "runs" / "demo")
    told = relax("ledger", run, cwd=tmp_path)
    assert (told.returncode, told.stdout) == (2, ""), told.stderr
    assert_says(told.stderr, "docker compose cp prompts:/keys/operator keys", "--credentials keys")
    (prompts,) = project.compose("ps", "-a", "-q", "prompts").split()
    project.docker("cp", f"{prompts}:/keys/operator", str(tmp_path / "keys"))
    read = relax("ledger", run, "--credentials", str(tmp_path / "keys"), cwd=tmp_path)
    assert read.returncode == 0, read.stderr
    assert read.stdout.endswith("the ledger is complete\n")


def assert_no_secret_is_told(project: Project) -> None:
    """Check that no private key is in logs, container settings, the run's folder, the streams or the image."""
    read = ["as-owner", "prepare", "sh", "-c", "cat /keys/*/nats.creds /keys/private/keys.json"]
    keys = project.compose("run", "--rm", "--no-deps", "-T", "--entrypoint", *read)
    words = [word.strip('",') for word in keys.split()]
    secrets = [word for word in words if word[:2] in ("SU", "SO", "SA") and len(word) > 50]
    assert len(secrets) > 10
    inspected = project.docker("inspect", *project.compose("ps", "-q").split())
    shown = [project.compose("logs"), inspected, project.docker("history", "--no-trunc", IMAGE)]
    assert not any(secret in text for secret in secrets for text in shown)
    # Events, cells and the run's state are in the broker's folder.
    pattern = "|".join(secrets)
    found = project.compose("exec", "-T", "nats", "as-owner", "sh", "-c", f"grep -rlE '{pattern}' /nats || true")
    kept = [path for path in (project.folder / "runs").rglob("*") if path.is_file()]
    found += "".join(str(path) for path in kept if any(secret.encode() in path.read_bytes() for secret in secrets))
    assert found.strip() == "", found
    look = ["run", "--rm", "--entrypoint", "sh", IMAGE, "-c"]
    files = "find / -xdev ( -name '*.creds' -o -name keys.json -o -name '*-key.pem' -o -name broker.json )"
    assert project.docker(*look, files.replace("(", "\\(").replace(")", "\\)") + " 2>/dev/null || true").strip() == ""


@pytest.mark.timeout(120)
def test_what_cannot_work_fails_at_once(make_project: MakeProject) -> None:
    project = make_project("run.steps=-1")
    assert "run.steps" in error_of_prepare(project)
    project.environment["SETTINGS"] = ""
    (project.folder / "runs" / "demo").mkdir(parents=True)
    (project.folder / "runs" / "demo" / "lock").touch()
    (project.folder / "runs" / "demo").chmod(0o500)
    os.chown(project.folder / "runs", 1001, 1001)
    assert_says(error_of_prepare(project), "run.folder runs/demo", "user 1001")
    os.chown(project.folder / "runs", 0, 0)
    (project.folder / "examples").chmod(0o700)
    said = error_of_prepare(project)
    assert_says(said, "./examples", "user 65532", "chmod -R o+rX examples")


def error_of_prepare(project: Project) -> str:
    """Start the containers, which must fail before any but the first has begun; return its output."""
    done = project.try_compose("up", "-d")
    assert done.returncode != 0
    found = [json.loads(project.docker("inspect", name))[0] for name in project.compose("ps", "-a", "-q").split()]
    started = [container for container in found if not container["State"]["StartedAt"].startswith("0001-")]
    begun = [(container["State"]["ExitCode"], container["RestartCount"]) for container in started]
    assert begun == [(2, 0)], begun
    said = project.compose("logs", "--no-color", "prepare")
    project.compose("down", "-v")
    return said


@pytest.mark.timeout(280)
def test_a_role_of_the_user_has_its_own_container_and_credentials(make_project: MakeProject) -> None:
    files = ("docker-compose.yml", "examples/custom_role/docker-compose.yml")
    project = make_project("run.steps=20", *files, run="custom-role")
    project.environment["CONFIG"] = "examples/custom_role/custom_role.toml"
    project.up()
    assert project.summary(200)["steps"] == 20
    (own,) = project.compose("ps", "-a", "-q", "length_penalty").split()
    mounts = {mount["Destination"] for mount in json.loads(project.docker("inspect", own))[0]["Mounts"]}
    assert mounts == {"/data/examples", "/data/runs", "/keys/length_penalty", "/keys/node"}


@pytest.mark.timeout(295)
def test_every_container_may_be_killed(make_project: MakeProject) -> None:
    project = make_project(SHORT.format(100_000))
    project.up(profiles=("console",))
    at = project.await_step(3)
    url, token, seen = project.console(links=1)
    assert (seen["run"], seen["live"], url) == ("demo", True, f"http://127.0.0.1:{project.environment['CONSOLE_PORT']}")
    assert httpx.get(f"{url}/api/run", trust_env=False, timeout=60).status_code == httpx.codes.UNAUTHORIZED
    with log_of(url, token, 0) as messages:
        read = [next(messages)[0] for _ in range(5)]
    for service in (*SERVICES, "nats", "console"):
        project.kill(service)
        at = project.await_step(at + 3, 60)
        say(f"{service} killed and started: step {at}")
        project.assert_ledger_holds()
    url, again, seen = project.console(links=2)
    assert again != token, "a socket that is bound anew has new tokens"
    assert seen["step"] >= at
    with log_of(url, again, read[-1]) as messages:
        read += [next(messages)[0] for _ in range(5)]
    assert read == list(range(1, 11)), "the log goes on where it was read"


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
    began = time.time()
    project.up("--scale", "rollout=3", "--no-recreate")
    say(f"two more rollouts, in seconds after scale: {times_of_start(project, began)}")
    # An actor is ready a moment before its lease shows it.
    wait_until(lambda: rollouts(project) == 3, "three rollouts", 20)
    project.up("--scale", "rollout=1", "--no-recreate")
    wait_until(lambda: rollouts(project) == 1, "one rollout", 60)
    at = project.await_step(project.step() + 3, 60)
    say(f"scaled down: step {at}")
    project.assert_ledger_holds()


def times_of_start(project: Project, since: float) -> dict[str, list[float]]:
    """Seconds since `began` at which two more rollouts had a container, had a process, and were ready."""

    def both_ready(heard: list[Event]) -> bool:
        return bool(sum(e["kind"] == "ready" and e["time"] > since for e in heard) == 2)

    heard = project.events("relax.demo.event.rollout.>", both_ready, 90)
    inspected = json.loads(project.docker("inspect", *project.containers("rollout")))
    made = [dt.datetime.fromisoformat(f"{c['State']['StartedAt'][:26]}+00:00").timestamp() for c in inspected]
    times = {"container": made} | {
        kind: [e["time"] for e in heard if e["kind"] == kind] for kind in ("started", "ready")
    }
    return {what: [round(at - since, 1) for at in sorted(found) if at > since] for what, found in times.items()}


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


@pytest.mark.timeout(295)
def test_with_tls_and_the_roles_of_profiles(make_project: MakeProject) -> None:
    # The trainer steps only on rows that have both columns.
    roles = "roles.reference.max_concurrent_rows=8 roles.actor_fwd.max_concurrent_rows=8 algorithm.proximal=actor_fwd"
    project = make_project(f"{SHORT.format(100_000)} {roles} algorithm.kl.place=loss algorithm.kl.coefficient=0.01")
    project.environment |= {"TLS": "1", "MUTUAL_TLS": "1"}
    project.up(profiles=("reference", "actor_fwd"))
    at = project.await_step(3)
    actors = project.relax("status", "demo")["actors"]
    assert {"reference", "actor_fwd"} <= {name.partition(".")[0] for name in actors}
    say(f"with mutual TLS, reference and actor_fwd: step {at}")
    with socket.create_connection(("127.0.0.1", int(project.environment["NATS_PORT"])), 5) as connection:
        greeting = connection.makefile("rb").readline()
    assert json.loads(greeting.removeprefix(b"INFO "))["tls_verify"]
    project.assert_ledger_holds()
