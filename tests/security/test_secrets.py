"""Passwords, seeds and keys of a real run, searched in every file, message, command line and environment."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.server import find_binary
from tests.support.guarded import MakeGuarded, free_port
from tests.support.messages import assert_says
from tests.support.running import Run, processes_of, wait_until

MakeRun = Callable[..., Run]
SINK, JUDGE, PROXY = "sink-5e1f9c", "judge-77aa01", "proxy-c4d1e2"
PASSWORD = "pass=w0rd-90ab"  # noqa: S105
ADDRESSES = {"broker.json", "config.json"}
"""Files of a run folder that may hold the password of broker.url, readable by their user only."""


@pytest.fixture
def operator_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SINK)
    monkeypatch.setenv("JUDGE_TOKEN", JUDGE)
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:{PROXY}@127.0.0.1:1")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """URL with a password of a server in a process of its own."""
    port, folder = free_port(), tmp_path / "server"
    folder.mkdir()
    (folder / "conf").write_text(
        f'listen: "127.0.0.1:{port}"\nauthorization {{ user: boss, password: "{PASSWORD}" }}\n'
        f'jetstream {{ store_dir: "{folder}/store" }}\nmax_payload: 8388608\n'
    )
    process = subprocess.Popen([str(find_binary()), "-c", str(folder / "conf"), "-l", str(folder / "log")])
    yield f"nats://boss:{PASSWORD}@127.0.0.1:{port}"
    process.terminate()
    process.wait()


def holders(folder: Path, secrets: list[str]) -> set[str]:
    """Files below a folder that hold one of the secrets, relative to the folder."""
    found = set()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            if any(secret.encode() in content for secret in secrets):
                found.add(str(path.relative_to(folder)))
    return found


def seeds_in(keys: Path) -> list[str]:
    """Secret keys in a folder of credentials."""
    files = [path.read_text() for path in keys.rglob("*") if path.suffix in (".creds", ".json")]
    found = re.findall(r"\bS[UAO][A-Z2-7]{40,}\b", "".join(files))
    assert len(set(found)) > 8
    return found


def shown_by_processes(run: Run, secrets: list[str]) -> dict[str, set[str]]:
    """Names of the run's processes whose command line or environment holds each secret."""
    found: dict[str, set[str]] = {secret: set() for secret in secrets}
    assert run.process is not None
    for pid in {*processes_of(run.folder.root), run.process.pid}:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
        except OSError:
            continue
        known = re.search(r"actor_process \S+ (\w+)|supervision\.(node|zygote) |(nats-server) -c|main (up) ", command)
        name = next((group for group in known.groups() if group), command) if known else command
        for secret in secrets:
            if secret in command:
                found[secret].add(f"command line of {name}")
            if secret in environment:
                found[secret].add(name)
    return found


def steps(run: Run, count: int) -> None:
    wait_until(lambda: all(run.pid_of(f"{role}.0") for role in ("reward", "trainer", "rollout")), "actors", 90)
    log = run.folder.root / "store"
    wait_until(lambda: len(list(log.rglob("*.safetensors"))) >= count, "segments of the run", 120)


@pytest.mark.slow
@pytest.mark.usefixtures("operator_environment")
def test_secrets_of_an_embedded_run_are_where_they_belong_only(make_run: MakeRun) -> None:
    run = make_run("secrets", "run.steps=3000", 'reward.secrets=["JUDGE_TOKEN"]').start()
    steps(run, 1)
    seeds = seeds_in(run.folder.broker / "keys")
    shown = shown_by_processes(run, [SINK, JUDGE, PROXY, *seeds])
    assert shown == {SINK: {"up"}, JUDGE: {"up", "node", "reward"}, PROXY: {"up"}, **{seed: set() for seed in seeds}}
    assert run.process is not None
    run.disconnect()
    run.process.send_signal(signal.SIGTERM)
    code, _, said = run.finish(60)
    assert code == 0, said
    assert not any(secret in said for secret in (SINK, JUDGE, PROXY, *seeds))
    assert holders(run.folder.root, [SINK, JUDGE, PROXY]) == set()
    holding = holders(run.folder.root, seeds)
    users = {path.name for path in (run.folder.broker / "keys").iterdir()} - {"private", "server"}
    assert users == {"prompts", "rollout", "reward", "advantages", "trainer", "node", "operator", "observer"}
    named = {f"{user}/nats.creds" for user in users} | {"private/keys.json"}
    assert holding == {f"broker/keys/{name}" for name in named}
    assert {(run.folder.root / name).stat().st_mode & 0o777 for name in holding} == {0o600}
    folders = (run.folder.root, run.folder.broker, *(run.folder.broker / "keys").rglob("*"))
    assert {path.stat().st_mode & 0o777 for path in folders if path.is_dir()} == {0o700}


@pytest.mark.slow
def test_secrets_of_a_keyed_run_stay_in_the_folder_of_its_credentials(
    make_guarded: MakeGuarded, make_run: MakeRun
) -> None:
    guarded = make_guarded(["run.name=keyed"])
    guarded.make()
    guarded.start()
    broker = [f"broker.url=nats://127.0.0.1:{guarded.port}", f"broker.credentials={guarded.keys}"]
    run = make_run("keyed", "run.steps=3000", *broker).start()
    steps(run, 1)
    secrets = seeds_in(guarded.keys)
    assert not any(shown_by_processes(run, secrets).values())
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    code, _, said = run.finish(60)
    assert code == 0, said
    assert not any(secret in said for secret in secrets)
    assert holders(run.folder.root, secrets) == set()
    # The messages of all streams are in the server's store.
    holding = holders(guarded.keys, secrets)
    assert {name.rpartition("/")[2] for name in holding} <= {"nats.creds", "keys.json"}
    assert {(guarded.keys / name).stat().st_mode & 0o777 for name in holding} == {0o600}


@pytest.mark.slow
@pytest.mark.usefixtures("operator_environment")
def test_password_of_the_broker_url_is_masked_in_arguments_output_and_messages(
    make_run: MakeRun, server: str, tmp_path: Path
) -> None:
    run = make_run("url", "run.steps=3000", f"broker.url={server}").start()
    steps(run, 1)
    assert not any(shown_by_processes(run, [PASSWORD]).values())
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    code, _, said = run.finish(60)
    assert code == 0, said
    masked = re.sub(r"boss:.*@", "***@", f"broker.url={server}")
    assert_says(said, "run.name=url run.steps=3000", masked, "resumes the run")
    assert PASSWORD not in said
    assert holders(run.folder.root, [PASSWORD]) == ADDRESSES
    assert {(run.folder.root / name).stat().st_mode & 0o777 for name in ADDRESSES} == {0o600}
    assert holders(tmp_path / "server", [PASSWORD]) == {"conf"}
    assert json.loads(run.folder.address.read_text())["password"] == PASSWORD
