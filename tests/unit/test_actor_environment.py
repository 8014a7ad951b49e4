"""Environment variables of the actors' processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from relax_actors.supervision.node import actor_environment
from tests.support.models import QWEN3, config_of

TENSORS = """
import resource, numpy
for turn in range(12):
    if turn == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [numpy.ones(1 << 20) for _ in range(6)]
    del held
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Fills and frees six tensors of 8 MiB again and again; prints the page faults of ten turns."""


def test_memory_of_freed_tensors_is_used_again_without_page_faults(tmp_path: Path) -> None:
    added = actor_environment(config_of(tmp_path / "run", QWEN3))
    command = [sys.executable, "-c", TENSORS]
    faults = int(subprocess.run(command, env=os.environ | added, capture_output=True, check=True, text=True).stdout)
    assert faults < 6 * (8 << 20) / 4096  # those of a single turn
