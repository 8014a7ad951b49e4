"""Monitors follow a run through its broker only, with the credentials of an observer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from broker.connection import Connection
from broker.streams import ensure_streams, log_spec
from broker.subjects import Subjects
from relax_actors.monitoring.sinks import LogMessage
from relax_actors.monitoring.sinks.prometheus import MAX_SERIES, Prometheus
from relax_actors.runtime.journal import Journal
from tests.support.guarded import Guarded, MakeGuarded, free_port
from tests.support.log_messages import event
from tests.support.running import wait_until
from tests.support.wandb_files import scalars_of

RUN = "watched"
EXAMPLE = Path(__file__).parents[2] / "examples" / "monitor"


@pytest.fixture
def watched(make_guarded: MakeGuarded) -> Guarded:
    """A server with a WebSocket port, `websocket`, and the log stream of a run."""
    from broker.listeners import Settings

    guarded = make_guarded([f"run.name={RUN}"])
    guarded.websocket = free_port()
    guarded.make(Settings(websocket=guarded.websocket))
    guarded.start()
    connection = Connection(guarded.address("operator"), "root")
    connection.call(ensure_streams(connection, [log_spec(Subjects(RUN), 1 << 24, 3600)]), 20)
    connection.close()
    return guarded


@contextmanager
def publishing(guarded: Guarded) -> Iterator[Callable[[], None]]:
    """A run that publishes steps repeatedly; call the yielded function to finish it."""
    connection = Connection(guarded.address("operator"), "run")
    over, ended = threading.Event(), threading.Event()

    def publish() -> None:
        roles = ("trainer", "evaluator", "run")
        trainer, evaluator, root = (Journal(connection, Subjects(RUN), role, 0) for role in roles)
        step = 0
        while not over.wait(0.05):
            root.metric({"kind": "run", "steps": 500})
            trainer.metric({"kind": "step", "step": step % 100, "reward": 0.25, "staleness": 1, "span": 0, "loss": 0.5})
            trainer.metric({"rows": step, "rss_mib": 100})
            evaluator.event("evaluated", version=3, reward=0.75)
            step += 1
            if ended.is_set():
                root.event("finished", steps=500)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield ended.set
    finally:
        over.set()
        thread.join()
        connection.close()


def monitor(guarded: Guarded, *more: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "relax_actors.cli.main", "monitor", "--broker", f"nats://127.0.0.1:{guarded.port}"]
    command += ["--credentials", str(guarded.keys), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd)


def page_of(port: int) -> str:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as reply:
        return str(reply.read().decode())
    return ""


def test_monitor_shows_a_run_and_feeds_prometheus_and_tensorboard(watched: Guarded, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'relax-actors[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    port = free_port()
    lines = [f'relax_step_reward{{run="{RUN}"}} 0.25', f'relax_actor_rss_mib{{n="0",role="trainer",run="{RUN}"}} 100.0']
    lines.append(f'relax_events_total{{kind="evaluated",role="evaluator",run="{RUN}"}}')
    with publishing(watched) as end:
        process = monitor(watched, "--sink", f"prometheus={port}", "--sink", f"tensorboard={tmp_path / 'board'}")
        wait_until(lambda: all(line in page_of(port) for line in lines), f"metrics: {lines}")
        end()
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0, said
    last = said.strip().splitlines()[-1]
    assert "/500 reward 0.250" in last, said
    assert last.endswith("; finished")
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert {"step/reward", "step/loss", "eval/reward"} <= set(board.Tags()["scalars"])
    assert board.Scalars("step/loss")[0].value == 0.5
    assert board.Scalars("eval/reward")[0].step == 3


def test_monitor_feeds_a_sink_of_the_working_directory(watched: Guarded, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "class Rewards:\n"
        "    def __init__(self, target, run):\n        self.file = open(target, 'w'); self.run = run\n"
        "    def take(self, message):\n        print(self.run, message.scalars(), file=self.file, flush=True)\n"
        "    def close(self):\n        print('closed', file=self.file, flush=True)\n"
    )
    with publishing(watched) as end:
        process = monitor(watched, "--sink", "rewards.Rewards=found.txt", cwd=tmp_path)
        found = tmp_path / "found.txt"
        wait_until(lambda: found.exists() and "eval/reward" in found.read_text(), "scalars in the file")
        end()
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0, said
    lines = found.read_text().splitlines()
    assert any(line.startswith(RUN) and "'step/reward': 0.25" in line for line in lines)
    assert lines[-1] == "closed"


def test_monitor_logs_to_weights_and_biases(watched: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install 'relax-actors[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with publishing(watched) as end:
        process = monitor(watched, "--sink", "wandb=checks")
        wait_until(lambda: list(tmp_path.glob("wandb/offline-run-*/run-*.wandb")), "run file of wandb", 60)
        end()
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    figures = scalars_of(path)
    assert {value for _, value in figures["step/reward"]} == {0.25}
    assert {value for _, value in figures["step/loss"]} == {0.5}
    assert set(figures["eval/reward"]) == {(3, 0.75)}
    steps = [step for step, _ in figures["step/reward"]]
    assert steps[:3] == list(range(steps[0], steps[0] + 3))


def test_python_example_prints_steps(watched: Guarded) -> None:
    command = [sys.executable, str(EXAMPLE / "watch.py"), RUN, f"nats://127.0.0.1:{watched.port}"]
    assert first_line([*command, str(watched.keys / "observer" / "nats.creds")], watched) == "step"
    code = (EXAMPLE / "watch.py").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 22


def test_javascript_example_prints_steps(watched: Guarded, tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    for name in ("watch.mjs", "package.json"):
        shutil.copy(EXAMPLE / name, tmp_path)
    subprocess.run([npm, "install", "--silent", "--no-audit", "--no-fund"], cwd=tmp_path, check=True, timeout=120)
    command = ["node", str(tmp_path / "watch.mjs"), RUN, f"ws://127.0.0.1:{watched.websocket}"]
    assert first_line([*command, str(watched.keys / "observer" / "nats.creds")], watched) == "step"


def first_line(command: list[str], watched: Guarded) -> str:
    """The first word that a program prints while a run publishes."""
    with publishing(watched):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
        assert process.stdout is not None
        killer = threading.Timer(30, process.kill)
        killer.start()
        line = process.stdout.readline()
        killer.cancel()
        process.terminate()
        _, said = process.communicate(timeout=20)
    assert "reward 0.250" in line, said
    return line.split()[0]


def test_prometheus_page_is_bounded_and_escaped() -> None:
    sink = Prometheus("0", RUN)
    for n in range(2 * MAX_SERIES):
        message = LogMessage.parse(f"relax.{RUN}.metric.flooding.{n}", b'{"rows": 1, "bad": "x", "nan": NaN}')
        assert message is not None
        sink.take(message)
    sink.take(event("a" * 64, "trainer"))
    page = sink.page().decode()
    lines = page.splitlines()
    assert len([line for line in lines if 'role="flooding"' in line]) == MAX_SERIES + 1
    assert f'relax_ignored_values_total{{role="flooding",run="{RUN}"}} {float(MAX_SERIES)}' in lines
    assert f'relax_events_total{{kind="{"a" * 64}",role="trainer",run="x"}} 1.0' in lines
    assert "nan" not in page
    assert page_of(sink.port) == page
    sink.close()


def test_numbers_out_of_range_are_ignored() -> None:
    huge = "1" + "0" * 400
    message = LogMessage.parse(
        f"relax.{RUN}.metric.r.0", f'{{"kind": "step", "step": 3, "x": {huge}, "y": 1}}'.encode()
    )
    assert message is not None
    assert message.scalars() == (3, {"step/y": 1.0})
    message = LogMessage.parse(f"relax.{RUN}.metric.r.0", b'{"kind": "step", "step": 1e30, "y": 1}')
    assert message is not None
    assert message.scalars() is None
