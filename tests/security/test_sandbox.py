"""Hostile reward functions in a sandbox reach nothing of the machine, and the honest part of them works."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.address import Address
from broker.listeners import Settings
from broker.server_keys import Users, write_keys
from relax_actors.cli.keys import make_keys
from relax_actors.config import load_config
from relax_actors.errors import ConfigError
from relax_actors.isolation import control_group
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.sandbox import SHARED_MEMORY, TMP, SandboxFiles, check_sandbox, command, limits
from tests.support import hostile_rewards
from tests.support.guarded import MakeGuarded
from tests.support.media_rows import write_config
from tests.support.messages import assert_says
from tests.support.running import TINY, Run, processes_of, wait_until

MakeRun = Callable[..., Run]


def unavailable() -> str:
    try:
        check_sandbox(load_config(TINY, ["reward.isolation=sandbox"]), ["reward"])
    except ConfigError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(unavailable()), reason=f"no sandbox here: {unavailable()}")


def set_targets(monkeypatch: pytest.MonkeyPatch, ports: list[int], folders: list[Path], files: list[Path]) -> None:
    for name, targets in zip(
        (hostile_rewards.PORTS, hostile_rewards.FOLDERS, hostile_rewards.FILES), (ports, folders, files), strict=True
    ):
        monkeypatch.setenv(name, " ".join(map(str, targets)))


def log_of(run: Run) -> str:
    return run.folder.log("reward.0").read_text(errors="replace")


@needs_sandbox
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_embedded", [False, True], ids=["keyed", "embedded"])
def test_attacks_of_a_sandboxed_reward_fail_and_its_rows_are_trained(
    make_run: MakeRun,
    make_guarded: MakeGuarded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_embedded: bool,  # noqa: FBT001
) -> None:
    """The credentials of the other roles are hidden, those of an embedded broker in the run folder, too."""
    guarded = make_guarded(["run.name=caged"])
    keys = guarded.keys
    broker = [f"broker.url=nats://127.0.0.1:{guarded.port}", f"broker.credentials={keys}"]
    if is_embedded:
        keys, broker = tmp_path / "runs" / "caged" / "broker" / "keys", [f"broker.port={guarded.port}"]
    else:
        guarded.make()
        guarded.start()
    others = [keys / name for name in ("trainer/nats.creds", "private/keys.json", "operator/nats.creds")]
    files = [*others, Path("/etc/shadow"), tmp_path / "runs" / "caged" / "lock"]
    folders = [tmp_path, Path.home(), *map(Path, ("/usr/local", "/etc", "/"))]
    set_targets(monkeypatch, [guarded.port], folders, files)
    # The code is in a folder above the credentials and the runs.
    for name in ("tiny.toml", "tiny_tasks.py", "hostile_rewards.py"):
        shutil.copy(TINY.parent / name, tmp_path)
    settings = ["reward.isolation=sandbox", "reward.function=hostile_rewards.attack", "run.steps=40"]
    run = make_run("caged", *settings, *broker, config=tmp_path / "tiny.toml").start()
    wait_until(lambda: run.folder.last_checkpoint, "checkpoint", 120)
    hit_keeper(run, signal.SIGKILL)
    code, result, said = run.finish()
    assert code == 0, said + log_of(run)
    assert (result["trained"], result["quarantined"]) == (160, 0)
    assert all(path.exists() for path in others)
    assert "REACHED" not in log_of(run)
    assert not (tmp_path / "planted").exists()


@needs_sandbox
def test_credentials_of_any_run_below_the_code_are_hidden(tmp_path: Path) -> None:
    """Those of a server that admits this run, and those of another run elsewhere, also through a link."""
    server, own = tmp_path / "keys", tmp_path / "second"
    make_keys(str(TINY), server, ["run.name=first"], Settings())
    make_keys(str(TINY), own, ["run.name=second"], Settings(server=server))
    other = tmp_path / "old" / "demo" / "broker" / "keys"
    write_keys(other, Users.operator("demo"))
    (tmp_path / "link").symlink_to(server)
    config = load_config(TINY, ["reward.isolation=sandbox", "run.name=second", f"run.folder={tmp_path}/runs/second"])
    folder = RunFolder(config.folder)
    folder.black_box("reward.0").parent.mkdir(parents=True)
    folder.black_box("reward.0").touch()
    folder.save_config(config, str(tmp_path))
    Address("nats://127.0.0.1:4222", credentials=str(own)).save(folder.address)

    info, ends = os.pipe()
    look = ["find", "-L", str(tmp_path), "-name", "keys.json", "-o", "-name", "nats.creds"]
    with command(SandboxFiles(folder, "reward", 0), ends, look) as (line, descriptor):
        found = subprocess.run(line, capture_output=True, text=True, check=False, pass_fds=[ends, descriptor])
    os.close(info)
    os.close(ends)
    assert (found.stdout, found.stderr) == (f"{own}/reward/nats.creds\n", "")


def test_link_to_a_folder_above_other_runs_is_refused(tmp_path: Path) -> None:
    """What a link leads to is shown, and bwrap can cover nothing below it."""
    project, link = tmp_path / "project", tmp_path / "code" / "link"
    (tmp_path / "code").mkdir()
    project.mkdir()
    link.symlink_to("../project")
    settings = ["reward.isolation=sandbox", f"run.folder={project}/runs/mine", f'reward.readable=["{link}"]']
    config = load_config(TINY, ["run.name=mine", *settings])
    folder = RunFolder(config.folder)
    folder.black_box("reward.0").parent.mkdir(parents=True)
    folder.black_box("reward.0").touch()
    folder.save_config(config, str(tmp_path / "code"))
    Address("nats://127.0.0.1:4222").save(folder.address)
    with pytest.raises(ConfigError) as refused:
        SandboxFiles(folder, "reward", 0).prepare()
    assert_says(refused.value, "sandbox of reward", link, f"{project}/runs", f"name {project}")


def hit_keeper(run: Run, number: signal.Signals) -> None:
    """Signal the process that the supervisor knows as the reward actor."""

    def keeper() -> int | None:
        return next(iter(processes_of(run.folder.root, "\0relax_actors.supervision.sandbox_keeper\0")), None)

    run.strike(keeper, "keeper of the sandbox", number)


@needs_sandbox
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fork_bomb_is_bounded_and_its_rows_are_trained(make_run: MakeRun) -> None:
    limits = ["reward.isolation=sandbox", "reward.max_processes=40"]
    run = make_run("bomb", "reward.function=hostile_rewards.fork_bomb", *limits, "run.steps=3")
    assert run.complete()["trained"] == 12
    forked = [int(line.split()[1]) for line in log_of(run).splitlines() if line.startswith("FORKED")]
    assert forked
    assert all(0 < n < 40 for n in forked)


@needs_sandbox
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sandboxed_reward_reaches_a_broker_with_mutual_tls(make_run: MakeRun, make_guarded: MakeGuarded) -> None:
    guarded = make_guarded(["run.name=secure"])
    guarded.make(Settings(tls=True, mutual=True))
    guarded.start()
    broker = [f"broker.url={guarded.url}", f"broker.credentials={guarded.keys}"]
    run = make_run("secure", "reward.isolation=sandbox", "run.steps=3", *broker)
    assert run.complete()["trained"] == 12


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs a control group")
def test_limit_that_would_not_bind_root_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(control_group, "parents", lambda _: [tmp_path / "none"])
    config = load_config(TINY, ["reward.isolation=sandbox", "reward.max_processes=40"])
    with pytest.raises(ConfigError) as refused:
        check_sandbox(config, ["reward"])
    assert_says(refused.value, "reward.max_processes", "root", "pids", f"{tmp_path}/none/")


@needs_sandbox
@pytest.mark.slow
def test_the_same_attacks_succeed_without_a_sandbox(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the test above would prove nothing."""
    victim = tmp_path / "secret"
    victim.write_text("x")
    set_targets(monkeypatch, [], [tmp_path], [victim])
    run = make_run("free", "reward.function=hostile_rewards.attack").start()
    wait_until(lambda: run.folder.log("reward.0").exists() and "REACHED" in log_of(run), "log of the attack", 60)
    line = next(line for line in log_of(run).splitlines() if "REACHED" in line)
    assert f"'write {tmp_path}'" in line
    assert f"'read {victim}'" in line
    assert "'processes'" in line


PROBE = """
import os, pathlib, sys
for folder in map(pathlib.Path, sys.argv[1:]):
    path = folder / "a.png"
    try:
        read = path.read_text() if path.exists() else "hidden"
        (folder / "planted").touch()
        written = "written"
    except OSError as error:
        written = os.strerror(error.errno)
    print(read, written)
"""


@needs_sandbox
def test_sandbox_of_a_reward_shows_the_folders_of_media_read_only(tmp_path: Path) -> None:
    """A reward opens the files of a prompt, and neither changes them nor sees others beside them."""
    data, more, private = (tmp_path / name for name in ("data", "more", "private"))
    for place in (data, more, private):
        place.mkdir()
        (place / "a.png").write_text(f"of {place.name}")
    path = write_config(data, [{"prompt": "<image>7>", "images": ["a.png"]}])
    settings = ["reward.isolation=sandbox", f"media.folders=['{more}']", f"run.folder={tmp_path}/run"]
    config = load_config(path, settings)
    folder = RunFolder(config.folder)
    folder.root.mkdir()
    folder.save_config(config, str(data))
    Address("nats://127.0.0.1:4222").save(folder.address)
    box = folder.black_box("reward.0")
    box.parent.mkdir(parents=True, exist_ok=True)
    box.touch()
    with (tmp_path / "info").open("w") as info:
        inner = [sys.executable, "-c", PROBE, str(data), str(more), str(private)]
        with command(SandboxFiles(folder, "reward", 0), info.fileno(), inner) as (line, descriptor):
            passed = [info.fileno(), descriptor]
            done = subprocess.run(line, capture_output=True, text=True, check=False, pass_fds=passed)
    refused = "Read-only file system"
    assert done.stdout.splitlines() == [f"of data {refused}", f"of more {refused}", "hidden No such file or directory"]


HOLDS = """
import os, sys
for folder in sys.argv[1:]:
    held = 0
    try:
        with open(folder + "/x", "wb", 0) as file:
            while held < 1 << 30: held += file.write(bytes(8 << 20))
    except OSError as error:
        print(folder, held >> 20, os.strerror(error.errno))
try: os.memfd_create("x")
except OSError as error: print(os.strerror(error.errno))
"""


def run_in_sandbox(tmp_path: Path, inner: list[str], *settings: str) -> tuple[int, str]:
    """Run a program in the sandbox of a reward, within its limits; return its exit code and output."""
    config = load_config(TINY, ["reward.isolation=sandbox", f"run.folder={tmp_path}/runs/demo", *settings])
    folder = RunFolder(config.folder)
    folder.black_box("reward.0").parent.mkdir(parents=True)
    folder.black_box("reward.0").touch()
    folder.save_config(config, str(tmp_path))
    Address("nats://127.0.0.1:4222").save(folder.address)
    with (
        (tmp_path / "info").open("w") as info,
        control_group.control_group(control_group.actor_name(str(tmp_path)), limits(config, "reward")) as group,
        command(SandboxFiles(folder, "reward", 0), info.fileno(), inner) as (line, descriptor),
    ):
        passed = [info.fileno(), descriptor]
        done = subprocess.run([*group.enter, *line], capture_output=True, text=True, check=False, pass_fds=passed)
    return done.returncode, done.stdout + done.stderr


@needs_sandbox
def test_processes_and_files_of_a_sandboxed_reward_are_bounded_together(tmp_path: Path) -> None:
    if not control_group.bounds_memory():
        pytest.skip(f"needs a control group with a limit of memory: {control_group.problem('memory')}")
    inner = [sys.executable, "-u", "-c", f"{HOLDS}\nprint(len(bytearray(300 << 20)))", TMP, SHARED_MEMORY]
    code, output = run_in_sandbox(tmp_path, inner, "reward.memory_limit_mib=64")
    assert code == 128 + signal.SIGKILL, output
    assert output.splitlines()[0].startswith(f"{TMP} 256 "), output


@needs_sandbox
def test_sandbox_of_a_reward_holds_no_memory_outside_its_limits(tmp_path: Path) -> None:
    """Files in memory have a size, folders that cover others take none, and no memory is held by descriptors."""
    hidden = tmp_path / "runs"
    inner = [sys.executable, "-c", HOLDS, TMP, SHARED_MEMORY, "/dev", "/", str(hidden)]
    _, output = run_in_sandbox(tmp_path, inner)
    full, read_only = "No space left on device", "Read-only file system"
    assert output.splitlines() == [
        f"{TMP} 256 {full}",
        f"{SHARED_MEMORY} 64 {full}",
        f"/dev 0 {read_only}",
        f"/ 0 {read_only}",
        f"{hidden} 0 {read_only}",
        "Operation not permitted",
    ]


def test_sandbox_that_cannot_be_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = load_config(TINY, ["reward.isolation=sandbox"])
    trusted = 'or set reward.isolation = "none" if you trust its code'

    def refusal() -> str:
        with pytest.raises(ConfigError) as caught:
            check_sandbox(config, ["reward", "trainer"])
        return str(caught.value)

    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal() == (
        'reward.isolation = "sandbox": bwrap is not installed; install bubblewrap (apt install bubblewrap); ' + trusted
    )
    fake = tmp_path / "bwrap"
    for said, remedy in (
        (
            "echo 'bwrap: No permissions to create a new namespace' >&2; exit 1",
            r"No permissions.*allow user namespaces",
        ),
        ("echo bubblewrap 0.7.1", r"bubblewrap 0\.7; install 0\.8 or newer"),
    ):
        fake.write_text(f"#!/bin/sh\n{said}\n")
        fake.chmod(0o755)
        assert re.search(remedy, refusal())
        assert refusal().endswith(trusted)
