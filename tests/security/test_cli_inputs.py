"""Malformed files and names on command lines: one clear message, exit code 2, no traceback, in bounded time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_actors.cli.main import run
from tests.support.hostile_text import steers
from tests.support.messages import assert_says
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


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: ascii(name)[:20])
def test_name_of_a_run_elsewhere_is_checked(refused: Callable[..., str], name: str) -> None:
    said = refused("monitor", "--broker", "nats://127.0.0.1:9", "--", name)
    assert said.startswith("relax: run name ")
    assert said.endswith("cannot be part of a subject; use 1 to 64 letters, digits, '-' or '_'\n")


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
    "wrong types": b"run = 3\ndata = []\nmodel = 'x'\n",
    "TOML of something else": b"[project]\nname = 'x'\n",
}


@pytest.mark.parametrize("kind", BINARY)
def test_file_that_is_no_configuration_is_refused(refused: Callable[..., str], tmp_path: Path, kind: str) -> None:
    path = tmp_path / "given.toml"
    if (data := BINARY[kind]) is not None:
        path.write_bytes(data)
    for command in (["check"], ["up"]):
        said = refused(*command, str(path))
        assert "given.toml" in said, said
    assert "given.toml" in refused("keys", str(path), str(tmp_path / "keys"))


@pytest.mark.parametrize(
    "setting", ["a." * 5000 + "b=1", "run." + "x." * 20 + "y=1", "=", "run=", ".=1", "run..steps=1"]
)
def test_overrides_that_name_no_setting_are_refused(refused: Callable[..., str], setting: str) -> None:
    said = refused("check", str(TINY), setting)
    assert_says(said, "section.key=value", "run.steps=10")


def test_configuration_that_is_nested_too_deeply_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    deep = tmp_path / "deep.toml"
    for text in ("[" + "a." * 5000 + "b]\nc = 1\n", "a = " + "[" * 50_000, "[a" + ".a" * 30 + "]\nc = 1\n"):
        deep.write_text(text)
        said = refused("check", str(deep))
        assert "nested" in said or "cannot be read as TOML" in said


@pytest.mark.parametrize(
    "role", ["", "=", "rollout=", "rollout=-1", "rollout=x", "rollout=" + "9" * 5000, "../x=1", "é"]
)
def test_roles_of_a_node_are_checked_before_anything_starts(
    refused: Callable[..., str], tmp_path: Path, role: str
) -> None:
    given = ["node", "--broker", "nats://127.0.0.1:9", "--store", str(tmp_path), "--run", RUN, f"--role={role}"]
    assert refused(*given).endswith("is no role=number with 1 to 999 actors\n")


@pytest.mark.parametrize("row", ["", "x", "group.1", "group.-1.2", "group.1.2.3", "eval.x.y", "batch.1.2"])
def test_row_that_is_none_is_refused_without_a_connection(refused: Callable[..., str], row: str) -> None:
    said = refused("quarantine", "show", RUN, "--broker", "nats://127.0.0.1:9", "--", row)
    assert_says(said, repr(row), "group.<step>.<index>", "eval.<version>.<index>")
