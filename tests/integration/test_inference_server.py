"""The keeper of an inference server runs the server that a backend describes, whatever the engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_actors.config import load_config
from relax_actors.engines.protocols.server import ServerRecord
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.pools import KEEPER_MODULE
from tests.support.faults import command_of
from tests.support.running import TINY, processes_of, wait_until

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "run")
    found.root.mkdir()
    config = load_config(TINY, ["rollout.backend=slow_server.SlowServed", "supervision.start_deadline=0.5"])
    found.save_config(config, str(TINY.parent))
    found.black_box("server.0").parent.mkdir(parents=True)
    found.black_box("server.0").touch()
    return found


@pytest.fixture
def keeper(folder: RunFolder) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", KEEPER_MODULE, str(folder.root), "0"]
    environment = os.environ | {"PYTHONPATH": f"{SUPPORT}:{SUPPORT.parents[1]}"}
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        yield process
        process.kill()


def record_of(folder: RunFolder) -> ServerRecord:
    found = wait_until(lambda: ServerRecord.load(folder.server(0)), "server")
    assert isinstance(found, ServerRecord)
    return found


def status_of(url: str, key: str) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})  # noqa: S310 our own server
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_server_of_any_engine_is_found_by_its_record_and_needs_its_key(
    folder: RunFolder, keeper: subprocess.Popen[bytes]
) -> None:
    record = record_of(folder)
    assert record.process_group == keeper.pid
    assert status_of(f"{record.url}/health", record.key) == 200
    assert status_of(f"{record.url}/health", "another") == 401
    assert not [pid for pid in processes_of(folder.root) if record.key in command_of(pid)]
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(60) == 0
    assert not folder.server(0).exists()
    wait_until(lambda: not processes_of(folder.root), "end of the server")


def test_a_keeper_ends_as_its_server_did(folder: RunFolder, keeper: subprocess.Popen[bytes]) -> None:
    record_of(folder)
    (server,) = [pid for pid in processes_of(folder.root) if "-m slow_server" in command_of(pid)]
    os.kill(server, signal.SIGKILL)
    assert keeper.wait(60) == -signal.SIGKILL
    assert not folder.server(0).exists()
