"""`relax up` as a user runs it: to the end, interrupted, resumed, watched from outside, and refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.address import Address
from broker.server import Server
from relax_actors.checks import require
from relax_actors.config import load_config
from relax_actors.errors import ConfigError
from relax_actors.messages import Trajectory
from relax_actors.monitoring.connection import connected
from tests.support.faults import story_of
from tests.support.messages import assert_says
from tests.support.running import SUPPORT, TINY, Run, processes_of, relax, relax_here, settings_of, wait_until

MakeRun = Callable[..., Run]
EXAMPLES = Path(__file__).parents[2] / "examples"


def abandoned_shared_memory() -> set[str]:
    """Names in /dev/shm that no process maps; tests beside this one use shared memory too."""
    names = {entry.inode(): entry.name for entry in os.scandir("/dev/shm")}  # noqa: S108 read only
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError), (process / "maps").open() as lines:
            # A semaphore is mapped under a name that no longer exists, so inode numbers are compared.
            for line in lines:
                if "/dev/shm/" in line:  # noqa: S108
                    names.pop(int(line.split(None, 5)[4]), None)
    return set(names.values())


def test_run_trains_to_the_end_and_leaves_only_its_folder(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("whole")
    before = abandoned_shared_memory()
    result = run.complete()
    assert result["steps"] == 8
    assert (result["admitted"], result["trained"]) == (32, 32)
    assert {p.name for p in tmp_path.iterdir()} == {"runs"}
    assert processes_of(run.folder.root) == []
    # What a test beside this one has just made is mapped a moment later.
    wait_until(lambda: abandoned_shared_memory() <= before, "removal of shared memory")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run.folder.model)
    tokenizer = AutoTokenizer.from_pretrained(run.folder.model)
    ids = tokenizer("12>", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, 3, 13)
    assert run.folder.reward_plot.read_bytes().startswith(b"\x89PNG")
    again = run.complete()
    assert again["weights_fingerprint"] == result["weights_fingerprint"]
    assert "the ledger is complete" in relax_here("ledger", "whole", cwd=tmp_path).stdout
    with connected(str(run.folder.root)) as at:
        subject = at.table.subjects.numbered("batch", 3)
        cell = at.table.get(subject)
        assert cell is not None
        at.table.remove([cell])
    broken = relax_here("ledger", "whole", cwd=tmp_path)
    assert (broken.returncode, "step 3 has weights but no batch" in broken.stdout) == (1, True), broken.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_stops_in_order_and_resumes(make_run: MakeRun, number: signal.Signals) -> None:
    run = make_run(f"stopped{number}", "run.steps=300").start()
    wait_until(lambda: run.table.get(f"relax.{run.name}.batch.5"), "batch.5", 90)
    port = int(Address.load(run.folder.address).url.rsplit(":", 1)[1])
    run.disconnect()
    assert run.process is not None
    run.process.send_signal(number)
    code, _, said = run.finish(60)
    assert code == 0, said
    assert "resumes the run" in said
    assert processes_of(run.folder.root) == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    code, result, said = run.start("run.steps=12").finish()
    assert code == 0, said
    assert result["steps"] >= 12
    assert result["trained"] == result["steps"] * 4


@pytest.mark.slow
def test_live_run_is_readable_by_status_tail_and_any_nats_client(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("watched", "run.steps=100000").start()
    wait_until(lambda: run.table.get("relax.watched.batch.3"), "batch.3", 90)
    shown = json.loads(relax("status", "watched", "--json", cwd=tmp_path).stdout)
    assert shown["steps"] == 100000
    assert shown["violations"] == []
    assert set(shown["actors"]) == {"prompts.0", "rollout.0", "reward.0", "advantages.0", "trainer.0"}
    events = relax("tail", "relax.watched.event.>", "--history", "--count", "10", cwd=tmp_path).stdout.splitlines()
    kinds = {json.loads(line.split(" ", 1)[1])["kind"] for line in events}
    assert {"started", "ready"} <= kinds
    cell = relax("tail", "relax.watched.group.*.*.trajectory", "--count", "1", cwd=tmp_path).stdout
    assert "Trajectory by rollout.0#1" in cell
    assert "logprobs" in cell

    async def listen() -> dict[str, Any]:
        import nats

        address = Address.load(run.folder.address).for_user("observer")
        client = await nats.connect(address.url, user_credentials=address.credentials)
        subscription = await client.subscribe("relax.watched.metric.trainer.*")
        message = await subscription.next_msg(timeout=10)
        await client.close()
        return dict(json.loads(message.data))

    import asyncio

    assert asyncio.run(listen())["role"] == "trainer"
    command = [sys.executable, "-m", "relax_actors.cli.main", "tail", "relax.watched.event.>", "--history"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert "relax.watched.event." in follower.stdout.readline()
        run.stop()
        rest, _ = follower.communicate(timeout=60)
    assert '"stopped"' in rest
    assert follower.returncode == 0


KEPT = "trainer.checkpoint_every=100000"
"""The table keeps every row."""


@pytest.mark.slow
def test_samples_end_at_stop_strings_of_several_tokens(make_run: MakeRun) -> None:
    strings = ["7", "12", "30", "345", "98"]
    run = make_run("stopping", "run.steps=100000", KEPT, f"rollout.stop={strings}", "rollout.max_tokens=12").start()
    ended = []
    for index in range(4):
        subject = f"relax.{run.name}.group.0.{index}.trajectory"
        found = wait_until(lambda subject=subject: run.table.fetch(subject, Trajectory), subject, 120)
        assert len(found.logprobs) == len(found.token_ids) == found.lengths.sum()
        samples = np.split(found.token_ids, np.cumsum(found.lengths)[:-1])
        for tokens, text, reason in zip(samples, found.texts, found.finish_reasons, strict=True):
            written = "".join([*"0123456789>#", "<pad>"][token] for token in tokens)
            assert not any(string in written[:-1] for string in strings), written
            completed = written.endswith(tuple(strings))
            ended.append(completed)
            assert reason == ("stop" if completed or written.endswith("#") else "length")
            assert reason == "stop" or len(tokens) == 12
            assert text == written.replace("<pad>", "").removesuffix("#")
    assert len(ended) == 16
    assert any(ended)


@pytest.mark.slow
def test_external_broker_is_used_and_left_running(make_run: MakeRun, tmp_path: Path) -> None:
    server = Server(tmp_path / "elsewhere")
    address = server.start()
    try:
        result = make_run("guest", *settings_of(address)).complete()
        assert result["trained"] == 32
        assert server.process is not None
        assert server.process.poll() is None
    finally:
        server.stop()


@pytest.mark.slow
def test_custom_role_example_trains_on_its_shaped_rewards(make_run: MakeRun) -> None:
    result = make_run("custom", config=EXAMPLES / "custom_role" / "custom_role.toml").complete()
    assert result["trained"] == 120 * 8
    assert result["reward_last"] > result["reward_first"] + 0.1


LONG = (
    "staleness.max=3",
    "rollout.min_tokens=48",
    "rollout.max_tokens=56",
    "rollout.max_concurrent_prompts=1",
    "run.steps=16",
)


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [True, False])
def test_in_flight_samples_continue_with_new_weights_only_if_enabled(make_run: MakeRun, *, in_flight: bool) -> None:
    run = make_run(
        "flight", *LONG, f"rollout.in_flight_updates={str(in_flight).lower()}", "trainer.max_tokens_per_microbatch=256"
    )
    result = run.complete()
    assert (result["steps"], result["trained"]) == (16, 64)
    story = story_of(run)
    steps = story.steps()
    spans = [step["span"] for step in steps]
    assert (max(spans) > 1) == in_flight, spans
    assert max(step["staleness"] for step in steps) <= 3
    # Log-probs belong to the recorded version of each token: the trainer's own are equal where staleness is 0.
    assert all(step["abs_delta"] < 1e-4 for step in steps if step["staleness"] == 0)
    # With three or more micro-batches a step, the first starts while rows are still being generated.
    assert sum(step["early_seconds"] > 0 for step in steps) > 0


@pytest.mark.slow
def test_role_that_cannot_start_ends_the_run_with_one_report(make_run: MakeRun) -> None:
    run = make_run(
        "hopeless", "supervision.intensity=1", "run.steps=100000", "roles.late.actor=tiny_tasks.FailsAfterWeights"
    )
    code, _, said = run.start().finish(90)
    assert code == 1
    assert "supervision gave up: late.0" in said
    assert "cannot start" in said
    assert processes_of(run.folder.root) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.lerning_rate=1", "did you mean 'learning_rate'"),
        ("reward.function=tiny_tasks.no_such_reward", "reward.function"),
        ("broker.url=nats://127.0.0.1:9", "broker nats://127.0.0.1:9 does not answer"),
    ],
)
def test_invalid_setting_is_refused_before_anything_starts(setting: str, message: str, tmp_path: Path) -> None:
    done = relax("up", str(TINY), setting, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").rglob("*.log"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.prompts_per_step=many", "trainer.prompts_per_step"),
        ("roles.shape.actor=nowhere.Role", "roles.shape.actor"),
        ("data.function=tiny_tasks.makes", "data.function"),
        ("rollout.max_tokens=100", "leaves no room for a prompt in the model's context"),
        ("trainer.max_tokens_per_microbatch=5", "trainer.max_tokens_per_microbatch"),
        ("advantages.reads=nothing", "advantages.reads"),
        ("run.name=a.b", "run name 'a.b'"),
        ("rollout.stop=['1x']", "rollout.stop '1x' cannot be written with the tokens of this model; choose a string"),
    ],
)
def test_invalid_setting_is_named(setting: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError) as refused:
        require(load_config(TINY, [setting]))
    assert message in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unfit", "roles.unready does not fit run unfit; remove it"),
        ("bug", "ZeroDivisionError: integer division or modulo by zero"),
    ],
)
def test_run_whose_streams_cannot_be_created_ends_with_the_reason(make_run: MakeRun, name: str, reason: str) -> None:
    run = make_run(name, "roles.unready.actor=tiny_stateful.Unready")
    code, _, said = run.start().finish(60)
    assert code == 1, said
    assert said.startswith(f"supervision gave up: root\n{reason}\n"), said
    assert_says(said, run.folder.log("root"), "fix the cause")


def test_missing_model_folder_is_refused_by_name(tmp_path: Path) -> None:
    text = TINY.read_text()
    start, end = text.index("[model.architecture]"), text.index("[data]")
    config = SUPPORT / "no_model.toml"
    config = tmp_path / "no_model.toml"
    config.write_text(text[:start] + '[model]\npath = "nothing"\n\n' + text[end:])
    (tmp_path / "tiny_tasks.py").write_text((SUPPORT / "tiny_tasks.py").read_text())
    done = relax_here("check", str(config), cwd=tmp_path)
    assert done.returncode == 2
    assert_says(done.stderr, "model folder", "config.json")


def test_port_in_use_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = relax("up", str(TINY), f"broker.port={port}", cwd=tmp_path)
    assert done.returncode == 2
    assert f"port {port} is in use; set broker.port" in done.stderr


@pytest.mark.slow
def test_data_file_without_prompts_is_refused_and_a_bad_line_is_noted(tmp_path: Path) -> None:
    text = TINY.read_text().replace('kind = "python"', 'kind = "jsonl"\npath = "data.jsonl"')
    text = text.replace('function = "tiny_tasks.make"\nsize = 500\n', "")
    (tmp_path / "tiny_tasks.py").write_text((SUPPORT / "tiny_tasks.py").read_text())
    (tmp_path / "config.toml").write_text(text)
    (tmp_path / "data.jsonl").write_text('{"question": "12>"}\n{"question": "3>"}\n')
    done = relax_here("check", "config.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert "data.fields.prompt" in done.stderr
    (tmp_path / "data.jsonl").write_text('{"prompt": "12>", "answer": "1"}\n{"question": "3>"}\n')
    done = relax_here("check", "config.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_says(done.stderr, "1 of the first 2 rows", "quarantined")


def test_two_runs_cannot_share_a_folder(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("shared", "run.steps=300").start()
    wait_until(run.folder.address.exists, "start")
    done = relax("up", str(TINY), "run.name=shared", "run.steps=300", cwd=tmp_path)
    assert done.returncode == 2
    assert "is in use by process" in done.stderr


def test_unwritable_run_folder_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = relax("up", str(TINY), f"run.folder={tmp_path}/file/run", cwd=tmp_path)
    assert done.returncode == 2
    assert_says(done.stderr, f"run.folder {tmp_path}/file/run", f"user {os.getuid()}", "is a file")


def test_check_prints_findings_and_starts_nothing(tmp_path: Path) -> None:
    demo = str(EXAMPLES / "demo" / "demo.toml")
    done = relax_here("check", demo, "run.steps=10", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert_says(done.stderr, "trainer.warmup_steps = 50", "run.steps = 10")
    assert "128 completions" in done.stderr
    assert "ok: this configuration can be run" in done.stderr
    refused = relax_here("check", demo, "rollout.stop=['1x']", "advantages.reads=nothing", cwd=tmp_path)
    assert refused.returncode == 2
    assert "failed: 2 errors" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_check_prints_the_resolved_configuration_without_passwords(tmp_path: Path) -> None:
    settings = ("run.steps=70", "broker.url=nats://me:secret@127.0.0.1:9")
    done = relax_here("check", str(EXAMPLES / "demo" / "demo.toml"), *settings, "--resolved", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["run"]["steps"] == 70
    assert shown["broker"]["url"] == "nats://***@127.0.0.1:9"
    assert "128 completions" in done.stderr
    assert "secret" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
