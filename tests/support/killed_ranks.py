"""Kills ranks of a trainer or critic in a run."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

from tests.support.running import Run, processes_of, wait_until


def rank_of(run: Run, rank: int, role: str = "trainer") -> int | None:
    """Process of a rank; None while it is restarted."""
    for pid in processes_of(run.folder.root):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "relax_actors.engines.ranks.rank" in command and command[-3:-1] == [role, str(rank)]:
            return pid
    return None


def kill_ranks(run: Run, role: str, moments: tuple[tuple[str, int | None], ...]) -> None:
    """Kill ranks of a role, or its actor, one after the other."""
    for cell, rank in moments:
        wait_until(partial(run.table.get, f"relax.{run.name}.{cell}"), cell, 180)
        if rank is None:
            run.kill(f"{role}.0")
        else:
            pid = wait_until(partial(rank_of, run, rank, role), f"rank {rank}")
            os.kill(pid, signal.SIGKILL)
