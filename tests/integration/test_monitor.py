"""Monitors hear a run through its broker alone, with an observer's credentials."""

from __future__ import annotations

import os
import shutil
import socket
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
from relax_actors.monitoring.sinks import Heard
from relax_actors.monitoring.sinks.prometheus import Prometheus
from relax_actors.runtime.journal import Journal
from tests.support.guarded import Guarded, MakeGuarded
from tests.support.running import wait_until

RUN = "watched"
EXAMPLE = Path(__file__).parents[2] / "examples" / "monitor"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def watched(make_guarded: MakeGuarded) -> Guarded:
    """A server with a WebSocket port, `websocket`, and a run's log."""
    from relax_actors.cli.keys import Settings

    guarded = make_guarded([f"run.name={RUN}"])
    guarded.websocket = free_port()
    guarded.make(Settings(websocket=guarded.websocket))
    guarded.start()
    connection = Connection(guarded.address("operator"), "root")
    connection.call(ensure_streams(connection, [log_spec(Subjects(RUN), 1 << 24, 3600)]), 20)
    connection.close()
    return guarded


@contextmanager
def talking(guarded: Guarded) -> Iterator[Callable[[], None]]:
    """A run that tells of its steps again and again; call what is given to let it end."""
    connection = Connection(guarded.address("operator"), "run")
    over, ended = threading.Event(), threading.Event()

    def talk() -> None:
        trainer, root = (Journal(connection, Subjects(RUN), role, 0) for role in ("trainer", "run"))
        step = 0
        while not over.wait(0.05):
            root.metric({"kind": "run", "steps": 500})
            trainer.metric({"kind": "step", "step": step % 100, "reward": 0.25, "staleness": 1, "span": 0, "loss": 0.5})
            trainer.metric({"rows": step, "rss_mib": 100})
            trainer.event("evaluated", version=3, reward=0.75)
            step += 1
            if ended.is_set():
                root.event("finished", steps=500)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield ended.set
    finally:
        over.set()
        thread.join()
        connection.close()


def monitor(guarded: Guarded, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "relax_actors.cli.main", "monitor", "--broker", f"nats://127.0.0.1:{guarded.port}"]
    command += ["--credentials", str(guarded.keys), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def page_of(port: int) -> str:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as reply:
        return str(reply.read().decode())
    return ""


def test_a_monitor_shows_a_run_serves_prometheus_and_writes_for_tensorboard(watched: Guarded, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'relax-actors[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    port = free_port()
    with talking(watched) as end:
        process = monitor(watched, "--prometheus", str(port), "--tensorboard", str(tmp_path / "board"))
        page = wait_until(lambda: "relax_step_reward" in (found := page_of(port)) and found, "a page with steps", 30)
        end()
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0, said
    last = said.strip().splitlines()[-1]
    assert "/500 reward 0.250" in last, said
    assert last.endswith("; finished")
    assert f'relax_step_reward{{run="{RUN}"}} 0.25' in page
    assert f'relax_actor_rss_mib{{run="{RUN}",role="trainer",n="0"}} 100.0' in page
    assert f'relax_events_total{{run="{RUN}",role="trainer",kind="evaluated"}}' in page
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert {"step/reward", "step/loss", "eval/reward"} <= set(board.Tags()["scalars"])
    assert board.Scalars("step/loss")[0].value == 0.5
    assert board.Scalars("eval/reward")[0].step == 3


def test_a_monitor_logs_for_weights_and_biases(
    watched: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="pip install 'relax-actors[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with talking(watched) as end:
        process = monitor(watched, "--wandb", "checks")
        wait_until(lambda: list(tmp_path.glob("wandb/offline-run-*/run-*.wandb")), "a file of the run", 60)
        end()
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    # One that can read it is not public: the names and values are in it as they are.
    data = path.read_bytes()
    assert b"step/reward" in data
    assert b"eval/reward" in data
    assert b"checks" in data


def test_the_python_example_prints_steps(watched: Guarded) -> None:
    command = [sys.executable, str(EXAMPLE / "watch.py"), f"nats://127.0.0.1:{watched.port}"]
    assert first_line([*command, str(watched.keys / "observer"), RUN], watched) == "step"
    code = (EXAMPLE / "watch.py").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 20


def test_the_javascript_example_prints_steps(watched: Guarded, tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("node and npm are not installed")
    for name in ("watch.mjs", "package.json"):
        shutil.copy(EXAMPLE / name, tmp_path)
    subprocess.run([npm, "install", "--silent", "--no-audit", "--no-fund"], cwd=tmp_path, check=True, timeout=120)
    command = ["node", str(tmp_path / "watch.mjs"), f"ws://127.0.0.1:{watched.websocket}"]
    assert first_line([*command, str(watched.keys / "observer"), RUN], watched) == "step"


def first_line(command: list[str], watched: Guarded) -> str:
    """The first word that a program prints while a run goes on."""
    with talking(watched):
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


def test_the_page_of_prometheus_is_bounded_and_escaped() -> None:
    sink = Prometheus("0")
    nasty = Heard.read(f"relax.{RUN}.event.x.0.y", b'{"kind": "a\\"b\\nc", "n": 1e999, "time": 3}')
    assert nasty is not None
    sink.take(nasty)
    assert r'kind="a\"b\nc"' in sink.page()
    for n in range(30_000):
        heard = Heard.read(f"relax.{RUN}.metric.r.{n}", b'{"rows": 1, "bad": "x", "nan": NaN}')
        assert heard is not None
        sink.take(heard)
    assert len(sink.page().splitlines()) < 20_010
    assert "nan" not in sink.page()
    assert page_of(sink.port) == sink.page()
    sink.close()
    for subject, data in ((f"relax.{RUN}.metric.r", b"{}"), (f"relax.{RUN}.metric.r.0", b"[1]"), ("a.b.c.d.e", b"{}")):
        assert Heard.read(subject, data) is None


def test_numbers_beyond_all_measure_are_passed_over() -> None:
    huge = "1" + "0" * 400
    heard = Heard.read(f"relax.{RUN}.metric.r.0", f'{{"kind": "step", "step": 3, "x": {huge}, "y": 1}}'.encode())
    assert heard is not None
    assert heard.scalars() == (3, {"step/y": 1.0})
    heard = Heard.read(f"relax.{RUN}.metric.r.0", b'{"kind": "step", "step": 1e30, "y": 1}')
    assert heard is not None
    assert heard.scalars() is None
