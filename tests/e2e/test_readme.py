"""The README's shell commands do what the README says, in the order in which a reader types them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from broker.address import Address
from tests.support.running import TINY, Run, relax, wait_until

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ENDLESS = ("relax tail", "relax monitor demo", "python examples/monitor/watch.py")
ELSEWHERE = {
    "make": "minutes long; what they run has tests of its own",
    "source": "needs a virtual environment at .venv",
    "docker": "needs a Docker engine; tests/e2e/compose",
    "relax up": "test_commands_about_a_configuration_work",
    "relax check": "test_commands_about_a_configuration_work",
    "relax keys": "test_commands_about_a_configuration_work",
    "relax node": "needs a second machine; tests/e2e/test_nodes.py",
    "relax monitor --broker": "needs a second machine; tests/integration/test_monitor.py",
}
"""Beginnings of commands that `test_live_run_is_watched_scaled_and_broken` does not run, with the reason."""


def commands(text: str) -> list[str]:
    """Commands of the code blocks without a language, without comments."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    return [re.sub(r"\s+#.*", "", line).strip() for line in lines]


def environment(folder: Path) -> dict[str, str]:
    """Environment with `relax` and `python` on the PATH, as in an activated virtual environment."""
    (folder / "bin").mkdir()
    for name, command in (("relax", f"{sys.executable} -m relax_actors.cli.main"), ("python", sys.executable)):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        script.chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}


def run_command(command: str, folder: Path, variables: dict[str, str]) -> str:
    """Run a command to its end, or an endless one until it prints; return its output."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", f"exec {command}"],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell in the background of another ignores Ctrl-C, and its children inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 no threads here
    )
    assert process.stdout is not None
    first = ""
    if command.startswith(ENDLESS):
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=110)
    assert first or process.returncode == 0, f"{command}: {said}"
    assert "Traceback" not in first, f"{command}: {first}{said}"
    return first + said


def test_every_command_is_run_by_a_test_or_has_a_reason() -> None:
    """A command that no pattern knows would be run by the test of a live run."""
    found = [command for command in commands(README) if not command.startswith(tuple(ELSEWHERE))]
    assert all(command.startswith(("relax ", "python ")) for command in found), found
    assert len(found) > 8
    for beginning in ELSEWHERE:
        assert any(command.startswith(beginning) for command in commands(README)), beginning


def nats_variables(folder: Path, variables: dict[str, str]) -> list[str]:
    """URL and credentials that the shell lines of docs/watch.md set for the NATS command line."""
    page = (ROOT / "docs" / "watch.md").read_text()
    lines = page[page.index("export NATS_URL") : page.index("nats sub ")]
    shown = 'echo "$NATS_URL $NATS_CREDS"'
    done = subprocess.run(
        ["/bin/sh", "-ec", lines + shown], cwd=folder, env=variables, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.slow
def test_live_run_is_watched_scaled_and_broken(make_run: Callable[..., Run], tmp_path: Path) -> None:
    variables = environment(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    run = make_run("demo", "run.steps=100000", "supervision.intensity=50").start()
    wait_until(lambda: run.table.get("relax.demo.batch.3"), "batch.3", 90)
    said = {}
    for command in commands(README):
        if not command.startswith(tuple(ELSEWHERE)):
            shorter = command.replace("--count 10 --every 5", "--count 2 --every 1")
            said[command.split("  ")[0]] = run_command(shorter, tmp_path, variables)
    assert "relax status demo" in said
    assert "rollout.0" in said["relax tree demo"]
    assert said["python examples/monitor/watch.py demo runs/demo/broker.json"].startswith("step ")
    (chaos,) = (text for command, text in said.items() if command.startswith("relax chaos"))
    assert "2 of 2 faults done" in chaos
    observer = Address.load(run.folder.address).for_user("observer")
    url, credentials = nats_variables(tmp_path, variables)
    assert (url, str(tmp_path / credentials)) == (observer.url, observer.credentials)
    run.end_in_order()


@pytest.mark.slow
def test_commands_about_a_configuration_work(tmp_path: Path) -> None:
    variables = environment(tmp_path)
    shutil.copy(TINY, tmp_path / "CONFIG.toml")
    shutil.copy(TINY.parent / "tiny_tasks.py", tmp_path)
    wanted = ("relax up CONFIG.toml", "relax check CONFIG.toml", "relax keys CONFIG.toml")
    found = [command for command in commands(README) if command.startswith(wanted)]
    assert len(found) == 6
    for command in found:
        run_command(command.replace("[section.key=value ...]", "run.name=other run.steps=4"), tmp_path, variables)
    done = relax("monitor", "other", cwd=tmp_path)
    remedy = "so there is nothing to watch; `relax status other` shows its last state"
    assert (done.returncode, done.stderr) == (2, f"relax: run other is not up, {remedy}\n")
    assert (tmp_path / "keys" / "observer" / "nats.creds").exists()
    if (git := shutil.which("git")) is None:
        return
    ignored = subprocess.run(
        [git, "-C", str(ROOT), "check-ignore", "keys/observer/nats.creds", "runs/demo/summary.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "not a git repository" not in ignored.stderr:
        assert ignored.stdout.split() == ["keys/observer/nats.creds", "runs/demo/summary.json"]
