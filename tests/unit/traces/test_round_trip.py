"""Traces through every format and back, bit for bit."""

from __future__ import annotations

import json
import tempfile
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from relax_actors.data.source import SourceSettings
from relax_actors.data.trace_files import TraceFiles
from relax_actors.data.traces import TraceRows
from relax_actors.errors import ConfigError
from relax_actors.messages import Trajectory
from relax_actors.traces import Trace, trajectory_of
from relax_actors.traces.exact_json import dumps
from relax_actors.traces.formats import FORMATS, trace_of
from tests.support.traces import rows, same_trace, write_traces

ENDINGS = {"atif": "jsonl", "verifiers": "jsonl", "openenv": "jsonl", "parquet": "parquet"}


def equal_bits(one: Trajectory, other: Trajectory) -> bool:
    """Compare all fields; arrays by type, shape and bytes."""

    def bits(value: object) -> object:
        return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    return all(bits(getattr(one, each.name)) == bits(getattr(other, each.name)) for each in fields(Trajectory))


def read(path: Path) -> list[Trace]:
    files = TraceFiles(SourceSettings(path=path))
    return [files.trace(number) for number in range(len(files))]


@given(row=rows())
@settings(max_examples=30, deadline=None)
def test_trajectory_comes_back_from_its_traces_with_the_same_bits(row: tuple[Trajectory, list[Trace]]) -> None:
    trajectory, traces = row
    assert equal_bits(trajectory_of(traces), trajectory)


@pytest.mark.parametrize("name", ["atif", "verifiers", "openenv"])
@given(row=rows())
@settings(max_examples=30, deadline=None)
def test_json_keeps_every_bit_of_a_trace(name: str, row: tuple[Trajectory, list[Trace]]) -> None:
    for trace in row[1]:
        line = dumps(FORMATS[name].record_of(trace), trace.name)
        assert same_trace(trace_of(json.loads(line), "here"), trace)


@given(row=rows())
@settings(max_examples=15, deadline=None)
def test_parquet_keeps_every_bit_of_a_trace(row: tuple[Trajectory, list[Trace]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.parquet"
        assert write_traces(path, "parquet", row[1]) == len(row[1])
        back = read(path)
    assert len(back) == len(row[1])
    assert all(same_trace(one, other) for one, other in zip(back, row[1], strict=True))


@given(row=rows())
@settings(max_examples=10, deadline=None)
def test_folder_of_documents_is_one_row_in_the_order_of_its_samples(row: tuple[Trajectory, list[Trace]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents"
        write_traces(path, "atif", row[1])
        found = TraceRows(TraceFiles(SourceSettings(path=path)))
        assert len(found) == 1
        assert equal_bits(trajectory_of(found.traces(0)), row[0])


@pytest.mark.parametrize("name", FORMATS)
def test_file_that_exists_is_not_replaced(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"a.{ENDINGS[name]}"
    path.write_text("kept")
    with pytest.raises(ConfigError, match="exists"):
        write_traces(path, name, [])
    assert path.read_text() == "kept"
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_parsed_json_gives_the_floats_that_were_written() -> None:
    smallest, odd = np.float32(-1e-45), np.float32(-0.1)
    turn = {"prompt_token_ids": [1], "completion_token_ids": [2, 3], "logprobs": [float(smallest), float(odd)]}
    record = {
        "schema_version": "ATIF-v1.8",
        "steps": [{"step_id": 1, "source": "agent", "message": "", "metrics": turn}],
    }
    trace = trace_of(json.loads(json.dumps(record)), "here")
    assert trace.sequences[0].logprobs.tobytes() == np.array([0, smallest, odd], np.float32).tobytes()
