"""What a killed actor held goes to another at once: nobody waits for its lease to end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.support.running import Run, processes_of, wait_until

MakeRun = Callable[..., Run]


def test_no_row_waits_for_the_lease_of_a_killed_actor_or_node(make_run: MakeRun) -> None:
    # With a lease of an hour the run ends only if what was held is given back.
    settings = ("supervision.ack_wait=3600", "supervision.intensity=50", "run.steps=16", "staleness.max=0")
    run = make_run("handover", *settings, "reward.function=tiny_tasks.slow_share_of_sevens").start()
    for step, actor in ((2, "rollout.0"), (4, "reward.0"), (6, "advantages.0"), (8, "rollout.0")):
        wait_until(lambda step=step: run.table.get(f"relax.handover.group.{step}.0.prompt"), f"step {step}", 60)
        run.kill(actor)
    wait_until(lambda: run.table.get("relax.handover.group.12.0.trajectory"), "step 12", 60)
    node = next(
        pid for pid in processes_of(run.folder.root) if b"supervision.node" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(node, signal.SIGKILL)
    run.disconnect()
    code, result, said = run.finish(120)
    assert code == 0, said
    assert (result["admitted"], result["trained"]) == (64, 64)
