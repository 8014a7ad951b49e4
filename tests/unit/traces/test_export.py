"""Export of the rows of a run: what cannot be written exactly is left out by name, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from broker.subjects import RowId
from broker.table import Table
from relax_actors.data.source import SourceSettings
from relax_actors.data.trace_files import TraceFiles
from relax_actors.errors import ConfigError
from relax_actors.messages import Batch, Prompt, Reward
from relax_actors.monitoring.traces import RunTraces
from relax_actors.record.record import Record
from relax_actors.traces import trajectory_of
from relax_actors.traces.write import check_output, write_records
from tests.support.traces import own


@pytest.mark.parametrize(("kind", "name"), [("atif", "a.jsonl"), ("verifiers", "folder"), ("parquet", "a.parquet")])
def test_row_that_cannot_be_written_exactly_is_left_out(tmp_path: Path, table: Table, kind: str, name: str) -> None:
    trajectory = trajectory_of([own(), own()])
    for index, score in enumerate((1.0, float("nan"), 2.0)):
        row = RowId(0, index)
        prompt = Prompt("p", trajectory.prompt_tokens, "", {"score": score}, 1, 0)
        table.put(table.subject(row, "prompt"), prompt)
        table.put(table.subject(row, "trajectory"), trajectory)
        table.put(table.subject(row, "reward"), Reward(np.array([index, 5], np.float32), {}))
    table.put(table.subjects.numbered("batch", 0), Batch([2, 1, 0], 0, 1, 0.5, 0, 4, 0.0))
    found = RunTraces(table, Record(tmp_path / "record"), "r", kind, 3)
    assert write_records(tmp_path / name, kind, found) == 4
    assert (found.rows, found.lacking) == (2, [])
    (problem,) = found.unreadable
    assert str(RowId(0, 1)) in problem
    assert "JSON" in problem
    files = TraceFiles(SourceSettings(path=tmp_path / name))
    assert [files.trace(number).reward for number in range(len(files))] == [2.0, 5.0, 0.0, 5.0]


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("parquet", "a.jsonl", r"a\.jsonl.*\*\.parquet.*atif"),
        ("parquet", "a", r"\*\.parquet"),
        ("atif", "a.parquet", r"a\.parquet.*\*\.jsonl"),
        ("verifiers", "a.json", r"a\.json.*\*\.jsonl"),
    ],
)
def test_format_that_the_ending_contradicts_is_refused(tmp_path: Path, kind: str, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_output(tmp_path / name, kind)
