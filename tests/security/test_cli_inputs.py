"""Malformed input of every command: one clear message, exit code 2, no traceback, in bounded time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.address import Address
from relax_actors.cli.main import run
from relax_actors.config import load_config
from relax_actors.runtime.run_folder import RunFolder
from tests.support.hostile_text import steers
from tests.support.running import TINY

RUN = "fuzzed"
LONG = "a" * 100_000
HOSTILE_NAMES = (
    "",
    " ",
    ".",
    "..",
    "../../etc",
    "/etc",
    "a/b",
    "a.b",
    "*",
    ">",
    "a b",
    "\x1b[31mx",
    "é数",
    "\u202ex",
    LONG,
)
URLS = (
    "",
    "nats://",
    "nats://:4222",
    "nats://h:0",
    "nats://h:99999",
    "nats://h:-1",
    "nats://h:x",
    "http://h:4222",
    "127.0.0.1",
    "nats://a b:4222",
    "nats://[::1:4222",
    "nats://h:4222,http://x:1",
    "nats://\x1b]0;x\x07:4222",
    "nats://" + LONG + ":99999",
)


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command as a shell does, and returns the message with which it is refused."""
    monkeypatch.chdir(tmp_path)

    def call(*command: str, code: int = 2) -> str:
        monkeypatch.setattr(sys, "argv", ["relax", *command])
        began = time.monotonic()
        with pytest.raises(SystemExit) as ended:
            run()
        out, said = capsys.readouterr()
        assert time.monotonic() - began < 20
        assert ended.value.code == code, said
        assert "Traceback" not in said
        assert said.strip(), "no message"
        assert not steers(said.replace("\x1b[", "") if said.startswith("\x1b[") else said), ascii(said[-500:])
        assert len(said) < 300_000
        assert not out
        return said

    return call


@pytest.fixture
def recorded(tmp_path: Path) -> RunFolder:
    """Folder of a run at a broker elsewhere."""
    config = load_config(TINY, [f"run.name={RUN}", "broker.url=nats://127.0.0.1:9"])
    folder = RunFolder(tmp_path / "runs" / RUN)
    folder.root.mkdir(parents=True)
    folder.save_config(config, str(TINY.parent))
    Address("nats://127.0.0.1:9").save(folder.address)
    return folder


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: ascii(name)[:20])
def test_name_that_is_no_run_is_refused(refused: Callable[..., str], name: str) -> None:
    for command in (["status"], ["tree"], ["ledger"], ["monitor"], ["quarantine", "list"], ["scale"]):
        more = ["rollout=2"] if command == ["scale"] else []
        said = refused(*command, "--", name, *more)
        assert said.startswith("relax: no run "), said[:500]
        assert said.endswith("exists; give the run's folder\n")


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: ascii(name)[:20])
def test_name_of_a_new_run_is_checked(refused: Callable[..., str], name: str) -> None:
    said = refused("check", str(TINY), f"run.name={name}")
    assert "run.name" in said


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: ascii(name)[:20])
def test_name_of_a_run_elsewhere_is_checked(refused: Callable[..., str], name: str) -> None:
    said = refused("monitor", "--broker", "nats://127.0.0.1:9", "--", name)
    assert said.startswith("relax: run name ")
    assert said.endswith("cannot be part of a subject; use 1 to 64 letters, digits, '-' or '_'\n")


@pytest.mark.parametrize("url", URLS, ids=lambda url: ascii(url)[:25])
def test_address_that_is_none_is_refused(refused: Callable[..., str], recorded: RunFolder, url: str) -> None:
    for command in (["monitor", RUN], ["status", RUN], ["tail", f"relax.{RUN}.>"]):
        said = refused(*command, "--broker", url)
        assert said.startswith("relax: broker address "), said[:500]
        assert said.endswith("is invalid; write nats://host:port\n")
    node = ["node", "--role", "rollout", "--store", str(recorded.root / "store"), "--broker", url]
    assert "broker address " in refused(*node, "--run", RUN)
    assert "broker" in refused("check", str(TINY), f"broker.url={url}") or url == ""


SETTINGS = (
    "run.steps",
    "=",
    "=3",
    "run.steps=",
    "run.steps=-1",
    "run.steps=0",
    "run.steps=1e400",
    "run.steps=nan",
    "run.steps=" + "9" * 5000,
    "run.steps=" + "[" * 5000,
    "run.steps={" * 3000,
    "run.steps=\x1b[31m",
    "run.steps=1\x00",
    "run=3",
    "run.steps.more=3",
    "nothing.steps=3",
    "rün.steps=3",
    ".run.steps=3",
    "run..steps=3",
    "run.steps=true",
    'run.steps="3',
    "trainer.learning_rate=inf",
    "trainer.learning_rate=-1",
    "reward.function=..",
    "reward.function=os.path.nothing",
    "reward.function=/etc/passwd",
    "reward.function=a b c",
    "reward.function=\x1b]0;x\x07.y",
    "reward.function=" + "a." * 5000 + "b",
    "roles.rollout.actor=os.system",
    "roles.é.actor=os.system",
    "data.path=/dev/null",
    "data.kind=\u202ejsonl",
    "model.path=/dev/zero",
    "model.path=/proc/self/mem",
    "store.path=/dev/null/x",
    "run.folder=/dev/null/x",
    "broker.credentials=/dev/zero",
)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: ascii(setting)[:30])
def test_setting_that_cannot_be_is_refused(refused: Callable[..., str], setting: str) -> None:
    said = refused("check", str(TINY), "--", setting)
    section = setting.partition("=")[0].partition(".")[0]
    assert section.encode("ascii", "ignore").decode() in said


BINARY = {
    "missing": None,
    "empty": b"",
    "zeros": b"\0" * 4096,
    "no UTF-8": b"\xff\xfe\x00[run]",
    "half": b"[run]\nname = ",
    "escapes": b"\x1b[31m = 3\n",
    "twice": b"[run]\nname = 'a'\n[run]\nname = 'b'\n",
    "nested": b"a = " + b"[" * 20_000,
    "number": b"a = " + b"9" * 100_000,
    "keys": b"[" + b"a." * 5000 + b"b]\n",
    "wrong types": b"run = 3\ndata = []\nmodel = 'x'\n",
    "TOML of something else": b"[project]\nname = 'x'\n",
}


@pytest.mark.parametrize("kind", BINARY)
def test_file_that_is_no_configuration_is_refused(refused: Callable[..., str], tmp_path: Path, kind: str) -> None:
    path = tmp_path / "given.toml"
    if (data := BINARY[kind]) is not None:
        path.write_bytes(data)
    for command in (["check"], ["up"], ["simulate"]):
        said = refused(*command, str(path))
        assert "given.toml" in said, said
    assert "given.toml" in refused("keys", str(path), str(tmp_path / "keys"))


def test_configuration_that_cannot_be_read_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    with (tmp_path / "huge.toml").open("wb") as file:
        file.truncate(1 << 34)
    for name in (
        "pipe.toml",
        "folder.toml",
        "loop.toml",
        "huge.toml",
        "a" * 300 + ".toml",
        "/dev/zero",
        "/dev/stdin/x",
    ):
        for command in ("check", "up"):
            assert Path(name).name[:20] in refused(command, name)


CREDENTIALS = {
    "empty": b"",
    "binary": bytes(range(256)) * 10,
    "text": b"password: hunter2\n",
    "cut": b"-----BEGIN NATS USER JWT-----\n",
    "no token": b"-----BEGIN NATS USER JWT-----\nx\n------END NATS USER JWT------\n",
    "no JSON": b"-----BEGIN NATS USER JWT-----\na.bm8.c\n------END NATS USER JWT------\n",
    "other JSON": b"-----BEGIN NATS USER JWT-----\na.WzFd.c\n------END NATS USER JWT------\n",
    "no name": b"-----BEGIN NATS USER JWT-----\na.eyJuYXRzIjp7fX0.c\n------END NATS USER JWT------\n",
}


@pytest.mark.parametrize("kind", CREDENTIALS)
def test_credentials_that_are_none_are_refused(
    refused: Callable[..., str], recorded: RunFolder, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "given.creds"
    path.write_bytes(CREDENTIALS[kind])
    for command in (["monitor", "--broker", "nats://127.0.0.1:9"], ["monitor", RUN], ["status", RUN], ["ledger", RUN]):
        said = refused(*command, "--credentials", str(path))
        assert said.startswith(f"relax: {path} is not a NATS .creds file"), said
        assert said.endswith("; name one written by `relax keys`\n")
        assert "hunter2" not in said


def test_credentials_of_a_folder_or_a_device_are_refused(refused: Callable[..., str], recorded: RunFolder) -> None:
    given = ["status", RUN, "--credentials"]
    assert "holds no credentials of operator" in refused(*given, str(recorded.root))
    assert "is not a NATS .creds file" in refused(*given, "/dev/zero")
    assert "/nowhere, which does not exist on this machine" in refused(*given, "/nowhere")


ROLES = ("", ",", "rollout,,", "nobody", "rollout nobody", "*", "../x", "\x1b[31m", "é", LONG, "rollout=3", "-1")


@pytest.mark.parametrize("roles", ROLES, ids=lambda roles: ascii(roles)[:20])
def test_roles_that_do_not_exist_are_refused(refused: Callable[..., str], roles: str) -> None:
    settings = ["broker.url=nats://127.0.0.1:9"]
    if roles != "rollout,,":
        assert "role" in refused("up", str(TINY), *settings, f"--roles={roles}")


NODE_ROLES = (
    "",
    "=",
    "rollout=",
    "rollout=-1",
    "rollout=x",
    "rollout=1e9",
    "rollout=" + "9" * 5000,
    "nobody=1",
    "../x=1",
)


@pytest.mark.parametrize("role", NODE_ROLES, ids=lambda role: ascii(role)[:20])
def test_roles_of_a_node_are_checked(refused: Callable[..., str], tmp_path: Path, role: str) -> None:
    given = ["node", "--broker", "nats://127.0.0.1:9", "--store", str(tmp_path), "--run", RUN, f"--role={role}"]
    if role != "nobody=1":
        assert "--role" in refused(*given)


@pytest.mark.parametrize(
    "name", ["", "a b", "../x", "\x1b[31m", "é", "a.b", "*", LONG], ids=lambda name: ascii(name)[:20]
)
def test_name_of_a_node_is_checked(refused: Callable[..., str], tmp_path: Path, name: str) -> None:
    given = ["node", "--broker", "nats://127.0.0.1:9", "--store", str(tmp_path), "--run", RUN, "--role=rollout"]
    assert "--name" in refused(*given, f"--name={name}")


@pytest.mark.parametrize(
    "subject", ["", "x", "relax", "relax..x", "relax.*.x", "relax.>", "\x1b.a.b", "relax.a b.c", LONG]
)
def test_subject_without_a_run_is_refused(refused: Callable[..., str], subject: str) -> None:
    assert refused("tail", "--", subject).startswith("relax: ")


@pytest.mark.parametrize(
    "row", ["", "x", "group.1", "group.-1.2", "group.1.2.3", "eval.x.y", "group.99999999999999999999.1"]
)
def test_row_that_is_none_is_refused(refused: Callable[..., str], recorded: RunFolder, row: str) -> None:
    said = refused("quarantine", "show", RUN, "--", row)
    assert said == f"relax: {row!r} does not name a row; a row is group.<step>.<index> or eval.<version>.<index>\n"


@pytest.mark.parametrize("number", ["-1", "x", "1.5", "9" * 400])
def test_numbers_of_options_are_checked(refused: Callable[..., str], recorded: RunFolder, number: str) -> None:
    assert "--count" in refused("tail", f"relax.{RUN}.>", f"--count={number}")
    assert "--count" in refused("monitor", RUN, f"--count={number}")
    assert "--websocket" in refused("keys", str(TINY), "keys", f"--websocket={number}")


@pytest.mark.parametrize(
    "command", [["nothing"], ["--nothing"], ["status"], ["up"], ["quarantine", "x"], ["tail"], ["\x07"]]
)
def test_command_line_that_is_none_is_refused(refused: Callable[..., str], command: list[str]) -> None:
    refused(*command)


def test_targets_of_sinks_are_refused(refused: Callable[..., str], recorded: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for sink in ("", "=", "x", "prometheus=-1", "tensorboard=file", "os.path=1", "nothing.Sink=1", "\x1b=1", "a..b=1"):
        given = ["monitor", "--broker", "nats://127.0.0.1:9", RUN, "--sink", sink]
        assert "--sink" in refused(*given)
