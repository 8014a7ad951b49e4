"""Version of the user's code that an actor reports in its lease."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from broker.address import Address
from broker.connection import Connection
from broker.leases import RunState
from broker.streams import ensure_bucket
from broker.table import Table
from relax_actors.config import load_config
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.runtime.user_code import code_files, version_of
from tests.support.running import TINY, wait_until

CODE = """
from pathlib import Path
from relax_actors.runtime.service_role import ServiceRole

class Late(ServiceRole):
    def setup(self):
        with Path(__file__).open("a") as file:
            file.write({text!r})

    async def start(self):
        pass
"""


@pytest.mark.parametrize("text", ["", "edited = True\n"], ids=["unchanged", "edited during the start"])
def test_actor_reports_only_a_version_that_it_has_certainly_imported(
    table: Table, connection: Connection, address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "own_late_role.py").write_text(CODE.format(text=text))
    (tmp_path / "run.toml").write_text(TINY.read_text() + '\n[roles.late]\nactor = "own_late_role.Late"\n')
    config = load_config(tmp_path / "run.toml", [f"run.name={table.subjects.run}"])
    before = version_of(code_files(config, "late", tmp_path))
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.save_config(config, str(tmp_path))
    address.save(folder.address)
    state = RunState(connection, connection.call(ensure_bucket(connection, table.subjects, 1), 20))
    command = [sys.executable, "-m", "relax_actors.supervision.actor_process", str(folder.root), "late", "0"]
    actor = subprocess.Popen(command)
    try:
        leases = wait_until(lambda: actor.poll() or connection.call(state.leases("late"), 10), "its lease")
    finally:
        actor.kill()
        actor.wait()
    assert isinstance(leases, dict), f"exit code {leases}"
    assert leases["late.0"]["code"] == ("" if text else before)
