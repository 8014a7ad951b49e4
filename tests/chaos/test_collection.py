"""Finished rows and files are removed, in spite of kills and of late writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from broker.leases import Failures, RunState
from broker.streams import ensure_bucket
from broker.subjects import RowId
from relax_actors.messages import Dropped, Quarantined
from relax_actors.monitoring.connection import connected
from relax_actors.monitoring.summary import read_curves, read_ledger
from tests.support.running import Run, wait_until

MakeRun = Callable[..., Run]
EVALUATED = (
    "eval.rows=6",
    "eval.every=3",
    "eval.reward=tiny_tasks.share_of_sevens",
    "eval.data.kind=python",
    "eval.data.function=tiny_tasks.make",
    "eval.data.size=6",
)


@pytest.mark.slow
def test_rows_below_the_floor_and_of_evaluated_versions_are_removed(make_run: MakeRun, tmp_path: Path) -> None:
    quick = ("run.steps=24", "supervision.intensity=50", "supervision.ack_wait=1")
    run = make_run("lean", *EVALUATED, *quick).start()
    table = run.table
    connection, subjects = table.connection, table.subjects
    wait_until(lambda: table.get(subjects.numbered("evaluation", 0)), "evaluation.0", 90)
    run.kill("evaluator.0")
    # Failures of, and late writes to, rows that are removed already or soon.
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects), 30))
    late = [RowId(0, 0), RowId(0, 0, "eval")]
    wait_until(lambda: table.get(subjects.numbered("checkpoint", 6)), "checkpoint.6", 90)
    # Written first: a trainer that purges the step at this moment and sees the later cells must see this one too.
    kept = RowId(0, 1)
    table.put(table.subject(kept, "quarantined"), Quarantined("reward", 1, "an error", ""))
    for row in late:
        table.put(table.subject(row, "late"), Dropped("late", ""))
        connection.call(state.count_failure("rollout", row, "an error", ""), 10)
    for row in late:
        segments = run.folder.root / "store" / row.kind / "0"
        segments.mkdir(parents=True, exist_ok=True)
        (segments / "0.late.safetensors").touch()
    left_behind = run.folder.checkpoints / "3.1"
    left_behind.mkdir(exist_ok=True)
    wait_until(lambda: table.get(subjects.numbered("evaluation", 12)), "evaluation.12", 90)
    run.kill("evaluator.0")
    run.kill("rollout.0")
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["admitted"], result["trained"]) == (96, 96)

    with connected(str(run.folder.root)) as at:
        ledger = read_ledger(at.table, at.config)
        assert ledger.violations() == []
        assert ledger.floor >= 20
        assert [version for version, _ in read_curves(at.table, ledger, from_data=False).evals] == list(range(0, 25, 3))
        assert {cell.step for cell in at.table.list_cells("relax.lean.eval.>")} == {24}
        below = [cell for cell in at.table.list_cells("relax.lean.group.>") if cell.step < ledger.floor]
        # The prompt of a quarantined row stays with it, unless the step was removed before it was quarantined.
        assert {cell.row for cell in below} == {kept}
        cells = {cell.field: at.table.get(at.table.subject(kept, cell.field)) for cell in below}
        assert {"quarantined"} <= cells.keys() <= {"quarantined", "prompt"}
        assert max(cells, key=lambda name: cells[name].sequence) == "quarantined"
        assert at.table.store.list_names("eval") in ([], ["24"])
        assert min(map(int, at.table.store.list_names("group")), default=ledger.floor) >= ledger.floor
        for row in late:
            assert at.table.connection.call(at.state.failures("rollout", row), 10) == Failures()
    assert not left_behind.exists()
    assert len(list(run.folder.checkpoints.iterdir())) == 2
