"""Redelivery: the messages of a killed actor go to another actor at once, not after `supervision.ack_wait`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker.subjects import RowId
from relax_actors.runtime.blackbox import BlackBox
from tests.support.faults import has_written, hit
from tests.support.running import Run, wait_until

MakeRun = Callable[..., Run]
ROWS = range(4)


def wait_until_reward_holds_a_whole_step(run: Run, first: int) -> int:
    """Wait until the reward actor has taken all rows of a step, from `first` on, and written none; return the step.

    A message still on its way to an actor that dies is in no black box and does wait for its deadline; here is none.
    """
    table = run.table
    step = first

    def holds() -> bool:
        nonlocal step
        rows = [RowId(step, i) for i in ROWS]
        if any(has_written(run, f"{row}.reward") for row in rows):
            step += 1
            return False
        cells = table.get_all(table.subject(row, "trajectory") for row in rows)
        box = BlackBox(run.folder.black_box("reward.0"))
        taken = {delivery.stream_sequence for delivery in box.read_with_deliveries().deliveries}
        box.close()
        return all(cell is not None and cell.sequence in taken for cell in cells)

    wait_until(holds, "step that the reward holds", 90)
    return step


@pytest.mark.slow
def test_rows_of_a_killed_actor_or_node_go_to_others_at_once(make_run: MakeRun) -> None:
    # With a deadline of an hour the run ends only if the deliveries are returned.
    settings = ("supervision.ack_wait=3600", "supervision.intensity=50", "run.steps=30", "staleness.max=0")
    run = make_run("handover", *settings, "reward.function=tiny_tasks.slow_share_of_sevens").start()
    step = wait_until_reward_holds_a_whole_step(run, 1)
    run.kill("reward.0")
    wait_until(lambda: run.table.get(f"relax.handover.batch.{step}"), f"batch.{step}", 60)
    step = wait_until_reward_holds_a_whole_step(run, step + 1)
    hit(run, "node")
    wait_until(lambda: run.table.get(f"relax.handover.batch.{step}"), f"batch.{step}", 120)
    run.disconnect()
    code, result, said = run.finish(120)
    assert code == 0, said
    assert (result["admitted"], result["trained"]) == (120, 120)
