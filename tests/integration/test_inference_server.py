"""The keeper of an inference server."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from broker.process import kill_group
from relax_actors.config import load_config
from relax_actors.runtime.exit_codes import EXIT_CRASHED
from relax_actors.runtime.run_folder import RunFolder
from tests.support.running import TINY, wait_until

BEGIN = """
import os, sys
from pathlib import Path
from relax_actors.engines.protocols.server import ServerSpec
from relax_actors.errors import EngineError
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.inference_server import InferenceServerProcess
root = Path(sys.argv[1])
"""
HANGS = """
hangs = (sys.executable, "-c", "import signal; signal.pause()")
spec = ServerSpec(command=hangs, health="/health", generates="/generates", key_variable="SERVER_KEY")
turns = iter([False, False])
os._exit(InferenceServerProcess(RunFolder(root), 0, spec, lambda: next(turns, True)).run())
"""
TAKES_TURNS = '''
answers = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()
"""
def leave(record, is_held):
    if not is_held():
        (root / "left").write_text(record.url)
        if (root / "refuses").exists():
            raise EngineError("it does not leave")
command = (sys.executable, "-c", answers)
spec = ServerSpec(command=command, health="/health", generates="/ready", key_variable="SERVER_KEY", leave=leave)
def turn():
    has_turn = (root / "turn").exists()
    (root / "seen").write_text(str(has_turn))
    return has_turn
os._exit(InferenceServerProcess(RunFolder(root), 0, spec, turn).run())
'''


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Folder of a run that waits 0.2 s for a start."""
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.save_config(load_config(TINY, ["supervision.start_deadline=0.2"]), str(TINY.parent))
    folder.black_box("server.0").parent.mkdir(parents=True)
    return folder


@contextmanager
def keeper(folder: RunFolder, code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A keeper in a process group of its own, as the node starts it."""
    command = [sys.executable, "-c", BEGIN + code, str(folder.root)]
    with subprocess.Popen(command, cwd=TINY.parent, start_new_session=True) as process:
        try:
            yield process
        finally:
            kill_group(process.pid)


def test_server_that_hangs_after_the_wait_for_its_turn_is_ended(folder: RunFolder) -> None:
    with keeper(folder, HANGS) as process:
        assert process.wait(60) == EXIT_CRASHED


@pytest.mark.parametrize("refuses", [False, True])
def test_server_leaves_its_device_after_the_turn_of_its_actor_or_is_killed(folder: RunFolder, *, refuses: bool) -> None:
    turn, left = folder.root / "turn", folder.root / "left"
    turn.touch()
    if refuses:
        (folder.root / "refuses").touch()
    with keeper(folder, TAKES_TURNS) as process:
        wait_until(folder.server(0).exists, "the server")
        assert not left.exists()
        for _ in range(2):
            turn.unlink()
            wait_until(left.exists, "the end of the turn")
            if refuses:
                assert process.wait(60) == -signal.SIGKILL
                return
            left.unlink()
            turn.touch()
            wait_until(lambda: (folder.root / "seen").read_text() == "True", "the next turn")
        assert process.poll() is None
