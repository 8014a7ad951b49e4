"""What commands print: secrets are masked, command lines can be pasted, phases are timed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from relax_actors.cli.command_lines import command_line
from relax_actors.cli.foreground import Request
from relax_actors.config import load_config
from relax_actors.config.masking import masked
from relax_actors.config.notes import shortened
from relax_actors.monitoring.watcher import Phases
from tests.support.log_messages import log_message, metric
from tests.support.running import TINY


def test_secrets_are_masked_wherever_they_stand() -> None:
    settings = {"url": "nats://a:b@one:1,nats://two:2", "judge": {"api_key": "k", "max_tokens": 3}, "password": None}
    assert masked(settings) == {
        "url": "nats://***@one:1,nats://two:2",
        "judge": {"api_key": "***", "max_tokens": 3},
        "password": None,
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("nats://me:p@ss@one:1", "nats://***@one:1"),
        ("nats://a:b@c@one:1,tls://d:e@f@two:2", "nats://***@one:1,tls://***@two:2"),
        ("nats://a:b,c@one:1", "nats://***@one:1"),
        ("https://github.com/owner/name@v2", "https://github.com/owner/name@v2"),
    ],
)
def test_account_is_masked_up_to_the_last_at_sign_of_a_server(text: str, shown: str) -> None:
    assert masked(text) == shown


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An executable `relax` below the working directory, which runs this process."""
    found = tmp_path / ".venv" / "bin" / "relax"
    found.parent.mkdir(parents=True)
    found.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(found)])
    return found


def test_command_is_relax_only_if_the_shell_finds_the_program_that_runs(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert command_line("status", "demo") == ".venv/bin/relax status demo"
    other = program.parents[2] / "other" / "relax"
    other.parent.mkdir()
    other.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(other.parent))
    assert command_line("status", "demo") == ".venv/bin/relax status demo"
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}/nowhere")
    assert command_line("status", "a b") == "relax status 'a b'"


def test_resume_command_repeats_settings_and_options_but_not_fresh(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(program.parent))
    settings = ("run.name=foo", "data.template=<{prompt}> $1")
    request = Request(
        Path("a.toml"), settings, ("prompts", "trainer"), as_json=True, quiet=True, must_finish=True, fresh=True
    )
    assert request.resume_command == (
        "relax up a.toml run.name=foo 'data.template=<{prompt}> $1' --roles prompts,trainer --json --quiet "
        "--must-finish"
    )


def test_settings_longer_than_the_run_are_noted() -> None:
    settings = ["run.steps=2", "trainer.warmup_steps=50", "trainer.warm_start={steps=12}"]
    evaluation = ["eval.every=200", "eval.data={kind='python', function='tiny_tasks.make'}"]
    assert "\n".join(shortened(load_config(TINY, settings + evaluation))) == (
        "trainer.warmup_steps = 50 is cut to run.steps = 2: the learning rate reaches its peak at the last step\n"
        "trainer.checkpoint_every = 3 is more than run.steps = 2: checkpoints are written before the first and after "
        "the last step only\n"
        "eval.every = 200 is more than run.steps = 2: versions 0 and 2 are evaluated\n"
        "trainer.warm_start.steps = 12 is more than run.steps = 2: these supervised steps come before version 0 and "
        "are not cut"
    )
    assert list(shortened(load_config(TINY))) == []


def test_phases_ignore_messages_of_earlier_starts_and_malformed_ones() -> None:
    phases = Phases(100.0, ["trainer.0", "rollout.0"])

    def event(actor: str, at: float) -> None:
        phases.take(log_message(f"event.{actor}.ready", {"kind": "ready", "time": at}))

    def step(at: float) -> None:
        phases.take(metric("trainer", kind="step", time=at))

    event("trainer.0", 99.0)
    step(99.5)
    event("rollout.0", 103.0)
    assert (phases.seconds_to_ready, phases.seconds_to_first_step) == (None, None)
    phases.take(log_message("event.trainer.0.ready", {"time": "soon"}))
    phases.take(log_message("event.rollout.0.ready", {"time": 101.0, "role": "trainer"}))
    phases.take(metric("rollout", kind="step", time=101.0))
    event("trainer.0", 102.0)
    event("rollout.0", 120.0)
    step(104.5)
    step(105.5)
    assert (phases.seconds_to_ready, phases.seconds_to_first_step) == (3.0, 4.5)
