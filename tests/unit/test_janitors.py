"""A janitor within the tree of another one finishes its work when the outer root is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from relax_actors.isolation.proc import process
from tests.support.running import wait_until

INNER = """
import subprocess, sys, time
from relax_actors.isolation.janitor import Janitor
janitor = Janitor(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=janitor.environment)
print(child.pid, flush=True)
time.sleep(600)
"""
OUTER = """
import os, subprocess, sys, time
from relax_actors.isolation.janitor import Janitor
janitor = Janitor()
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env=os.environ | janitor.environment)
time.sleep(600)
"""


def test_janitor_waits_for_the_janitors_within_its_tree(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", OUTER, INNER, str(folder)], stdout=subprocess.PIPE) as root:
        assert root.stdout is not None
        pid = int(root.stdout.readline())
        assert folder.exists()
        assert process(pid) is not None
        root.kill()
    wait_until(lambda: process(pid) is None and not folder.exists(), "the end of the inner tree")
