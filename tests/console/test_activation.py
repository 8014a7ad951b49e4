"""The console of `relax up`: what becomes of one that cannot work."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from relax_actors.console.activation import Activation
from relax_actors.console.link import open_link
from relax_actors.runtime.run_folder import RunFolder
from tests.support.consoles import LinkedConsole, WrittenRun
from tests.support.running import processes_of

pytestmark = pytest.mark.slow


def test_console_that_cannot_work_refuses_who_waits_for_it(tmp_path: Path) -> None:
    activation = Activation(RunFolder(tmp_path))  # the folder holds no run, so the process fails
    activation.start()
    with socket.create_connection(("127.0.0.1", activation.link.port), timeout=60) as client:
        assert client.recv(1) == b"", "the connection is closed, and starts no further process"
    assert processes_of(tmp_path) == []
    activation.close()
    assert "no run" in (tmp_path / "logs" / "console.log").read_text()


def test_link_of_a_run_holds_beside_a_later_console(written: WrittenRun) -> None:
    console = LinkedConsole(written)
    link, listener = open_link(written.folder.root)
    listener.close()
    assert link.observer != console.token
    head = {"Authorization": f"Bearer {console.token}"}
    answer = httpx.get(f"{console.url}/api/session", headers=head, trust_env=False, timeout=60)
    console.stop()
    assert (answer.status_code, answer.json()["run"]) == (200, written.name)
