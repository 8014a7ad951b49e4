"""The keeper of an inference server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from relax_actors.config import load_config
from relax_actors.runtime.exit_codes import EXIT_CRASHED
from relax_actors.runtime.run_folder import RunFolder
from tests.support.running import TINY

KEEPER = """
import os, sys
from pathlib import Path
from relax_actors.engines.protocols.server import ServerSpec
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.inference_server import InferenceServerProcess

hangs = (sys.executable, "-c", "import signal; signal.pause()")
spec = ServerSpec(command=hangs, health="/health", generates="/generates", key_variable="SERVER_KEY")
turns = iter([False, False])
os._exit(InferenceServerProcess(RunFolder(Path(sys.argv[1])), 0, spec, lambda: next(turns, True)).run())
"""


def test_server_that_hangs_after_the_wait_for_its_turn_is_ended(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.save_config(load_config(TINY, ["supervision.start_deadline=0.2"]), str(TINY.parent))
    folder.black_box("server.0").parent.mkdir(parents=True)
    done = subprocess.run([sys.executable, "-c", KEEPER, str(folder.root)], timeout=60, check=False)
    assert done.returncode == EXIT_CRASHED
