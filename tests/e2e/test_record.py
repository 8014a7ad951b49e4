"""The record of a real run: whole although the recorder is killed again and again, and no part of the run."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.subjects import RowId
from relax_actors.messages import Batch
from relax_actors.record.frames import Frame, frames_of
from relax_actors.record.position import MAX_STEPS
from relax_actors.record.record import Record, row_of
from relax_actors.record.segments import Shelf, segments_in
from tests.support.faults import hit, process, story_of
from tests.support.running import Run, relax, wait_until

STEPS = 25
KEPT = "trainer.checkpoint_every=1000000"
"""The table keeps every row, to compare the record with."""


def oldest_step(run: Run) -> int:
    """First step of which the table has rows."""
    steps = [cell.step for cell in run.table.list_cells(f"{run.table.subjects.prefix}.group.>")]
    return min(steps, default=0)


DATA = ("eval.data.kind=python", "eval.data.size=4", "eval.data.function=tiny_tasks.make")


def rows_in(folder: Path) -> Counter[RowId]:
    """How often each row is in the record."""
    parts = [part for segment in segments_in(folder) for part in frames_of(segment.path)]
    return Counter(row for part in parts if isinstance(part, Frame) and (row := row_of(part)) is not None)


def kill_between_rows(run: Run, times: int) -> None:
    """Kill the recorder as soon as it has kept another row, so often."""
    for _ in range(times):
        kept, pid = rows_in(run.folder.record).total(), wait_until(lambda: process(run, "recorder"), "recorder")
        wait_until(lambda kept=kept: rows_in(run.folder.record).total() > kept, "another row")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: process(run, "recorder") != pid, "end of the recorder")


@pytest.mark.slow
def test_a_killed_recorder_misses_no_row_and_keeps_none_twice(make_run: Callable[..., Run]) -> None:
    run = make_run("recorded", "run.steps=1000000", "record.every=1", KEPT).start()
    kill_between_rows(run, times=3)
    record = Record(run.folder.record)
    wait_until(lambda: max(record.steps(), default=0) > STEPS, "recorded steps")
    for step in range(STEPS):
        batch = run.table.fetch(run.table.subjects.numbered("batch", step), Batch)
        assert batch is not None
        rows = [RowId(step, index) for index in batch.rows]
        assert set(record.rows("group", step)) >= set(rows)
        for row in rows:
            kept = record.row(row)
            assert kept is not None
            assert {"prompt", "trajectory", "reward", "advantage"} <= set(kept.cells)
            stored = run.table.get_all([run.table.subject(row, field) for field in kept.cells])
            assert [cell and cell.data for cell in stored] == [cell.data for cell in kept.cells.values()]
    run.end_in_order()
    assert set(rows_in(run.folder.record).values()) == {1}
    assert record.damages() == []
    assert record.steps() == list(range(len(record.steps())))


@pytest.mark.slow
def test_a_finished_run_has_its_last_steps_and_evaluations(make_run: Callable[..., Run]) -> None:
    run = make_run("finished", "record.every=0", "eval.rows=4", "eval.every=4", *DATA)
    run.complete()
    record = Record(run.folder.record)
    assert (record.steps(), record.versions()) == (list(range(8)), [0, 4, 8])
    for step in range(8):
        found = record.step(step)
        assert found is not None
        assert not found.collected
        means = {group.index: group.reward for group in found.groups if group.reward is not None}
        assert len(means) == len(found.groups) == 4
        kept = {row.index: record.row(row) for row in record.rows("group", step)}
        assert {means[index] for index in kept} == {max(means.values()), min(means.values())}
    assert [row.index for row in record.rows("eval", 8)] == [0, 1, 2, 3]
    highest, _ = shown = record.rows("group", 1)
    lines = relax("samples", "finished", "--step", "1", "--json", cwd=run.cwd).stdout.splitlines()
    assert [json.loads(line)["row"] for line in lines if "group" in line] == [str(row) for row in shown]
    one = ("samples", "finished", "--step", "1", "--row", str(highest.index))
    detail = json.loads(relax(*one, "--json", cwd=run.cwd).stdout)
    assert [part["author"] for part in detail["parts"]][1:3] == ["rollout.0#1", "reward.0#1"]
    strip = detail["samples"][0]["strips"][0]
    assert len({len(strip[name]) for name in ("ids", "texts", "mask", "versions")}) == 1
    assert "parts:" in relax(*one, cwd=run.cwd).stdout
    lacking = next(index for index in range(4) if RowId(1, index) not in shown)
    missing = relax(*one[:-1], str(lacking), cwd=run.cwd)
    assert missing.returncode == 1
    assert "record.every" in missing.stderr
    (segment,) = segments_in(run.folder.record, Shelf.ROWS)
    whole = [part for part in frames_of(segment.path) if isinstance(part, Frame)]
    data = bytearray(segment.path.read_bytes())
    data[next(part.body_at for part in whole if row_of(part) == highest)] ^= 1
    segment.path.write_bytes(data)
    damaged = relax("samples", "finished", "--step", "1", "--json", cwd=run.cwd)
    assert "is damaged at byte" in damaged.stderr
    assert str(highest) in damaged.stderr
    assert [json.loads(line)["row"] for line in damaged.stdout.splitlines() if "group" in line] == [str(shown[1])]


@pytest.mark.slow
def test_rows_wait_for_a_stopped_recorder_within_a_bound(make_run: Callable[..., Run]) -> None:
    run = make_run("awaited", "run.steps=1000000").start()
    recorder = hit(run, "recorder", signal.SIGSTOP)
    wait_until(lambda: story_of(run).floor, "a floor", 120)
    assert oldest_step(run) == 0 or story_of(run).floor > MAX_STEPS
    wait_until(lambda: story_of(run).floor > MAX_STEPS + 10, "a floor beyond the bound", 120)
    floor = story_of(run).floor
    wait_until(lambda: oldest_step(run) >= floor - MAX_STEPS, "collected steps", 120)
    oldest = oldest_step(run)
    os.kill(recorder, signal.SIGCONT)
    record = Record(run.folder.record)
    last = wait_until(lambda: max(record.steps(), default=0), "recorded steps")
    floor = story_of(run).floor
    wait_until(lambda: oldest_step(run) > last, "collected rows of recorded steps", 120)
    run.end_in_order()
    lost = [step for step in record.steps() if (found := record.step(step)) is not None and found.collected]
    assert 0 < oldest <= len(lost) < floor
    assert lost == list(range(len(lost)))
