"""Rows of files of traces: which traces are one row, and what of a row is trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.data.source import SourceSettings
from relax_actors.data.sources import open_source
from relax_actors.data.trace_maker import TraceMaker, prompt_of_traces
from relax_actors.data.traces import open_traces
from relax_actors.errors import ConfigError, RowError
from relax_actors.messages import MediaSource
from relax_actors.traces import Trace, TraceError
from tests.support.traces import digits, own, write_traces


def written(folder: Path, *traces: Trace) -> Any:
    path = folder / "a.jsonl"
    path.unlink(missing_ok=True)
    write_traces(path, "verifiers", traces)
    return open_traces(SourceSettings(path=path))


def test_traces_of_a_row_that_changed_since_its_admission_are_refused(tmp_path: Path) -> None:
    tokenizer = digits(tmp_path / "model")
    before = prompt_of_traces(written(tmp_path, own())[0], tokenizer, seed=0, min_version=3)
    made = TraceMaker(written(tmp_path, own()), tokenizer, tokenizer.size).make(before)
    assert made.versions.tolist() == [3, 3]
    changed = TraceMaker(written(tmp_path, own(reward=2.0)), tokenizer, tokenizer.size)
    with pytest.raises(RowError, match="have changed since the row was admitted"):
        changed.make(before)


def test_row_of_a_part_of_the_data_is_read_by_the_numbers_of_its_traces(tmp_path: Path) -> None:
    tokenizer = digits(tmp_path / "model")
    rows = [own(row=name, reward=reward) for name, reward in (("a", 1.0), ("b", 2.0), ("b", 3.0), ("c", 4.0))]
    whole = written(tmp_path, *rows)
    part = open_source("traces", path=tmp_path / "a.jsonl", rows="1:", options={"take": "best"})
    before = prompt_of_traces(part[0], tokenizer, seed=0, min_version=0)
    made = TraceMaker(whole, tokenizer, tokenizer.size).make(before)
    assert made.metrics["recorded_reward"] == [3.0]
    # A row that was admitted before marks had numbers.
    mark = {"item": 1, "xxh3": before.metadata["trace"]["xxh3"]}
    earlier = TraceMaker(
        open_traces(SourceSettings(path=tmp_path / "a.jsonl", options={"take": "best"})), tokenizer, 99
    )
    assert np.array_equal(earlier.make(replace(before, metadata={"trace": mark})).token_ids, made.token_ids)


def test_traces_with_media_or_rewards_of_tokens_are_not_trained(tmp_path: Path) -> None:
    image = MediaSource("image", "/a.png", xxh3_128="0" * 32)
    with pytest.raises(TraceError, match=r"media.*/a\.png"):
        written(tmp_path, own(media=(image,)))[0]
    values = {"reward": np.zeros(2, np.float32)}
    with pytest.raises(TraceError, match="rewards of single tokens"):
        written(tmp_path, own(token_values=values))[0]


def test_rows_are_traces_of_one_row_or_of_one_prompt(tmp_path: Path) -> None:
    other = own(prompt_tokens=np.array([1], np.int32))
    assert (
        len(written(tmp_path, own(row="group.0.0"), own(row="group.0.0"), own(row="group.0.1"), own(), own(), other))
        == 4
    )


@pytest.mark.parametrize("bad", ["no JSON", '{"version": 1}', '{"version": 1, "nodes": [{}]}'])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_row_with_an_unreadable_sample_is_refused_as_a_whole(tmp_path: Path, bad: str, place: int) -> None:
    written(tmp_path, own(row="a"), own(row="a"), own(row="b"))
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    lines.insert(place, bad)
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = open_traces(SourceSettings(path=tmp_path / "a.jsonl"))
    assert len(source) == 2
    with pytest.raises(RowError, match=f"line {place + 1}"):
        source[0]
    assert source[1].traces[0].row == "b"
    best = open_traces(SourceSettings(path=tmp_path / "a.jsonl", options={"take": "best"}))
    with pytest.raises(RowError, match=f"line {place + 1}"):
        best[0]


def test_sample_that_is_malformed_stays_in_its_row(tmp_path: Path) -> None:
    written(tmp_path, own(row="a"), own(row="b"), own(row="b"))
    path = tmp_path / "a.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[1]["info"]["relax_actors"]["text"] = None
    path.write_text("\n".join(map(json.dumps, records)))
    source = open_traces(SourceSettings(path=path))
    assert (len(source), source[0].traces[0].row) == (2, "a")
    with pytest.raises(RowError, match=r"line 2.*text is None"):
        source[1]


def test_rows_of_parquet_are_found_by_their_columns(tmp_path: Path) -> None:
    traces = [own(row="a", reward=0.5), own(row="a", reward=1.0), own(), own(), own(prompt_tokens=np.array([1], "i4"))]
    write_traces(tmp_path / "a.parquet", "parquet", traces)
    source = open_traces(SourceSettings(path=tmp_path / "a.parquet", options={"take": "best"}))
    assert [source[i].traces[0].reward for i in range(len(source))] == [1.0, 1.0, 1.0]


def test_fields_of_traces_cannot_be_renamed(tmp_path: Path) -> None:
    written(tmp_path, own())
    with pytest.raises(ConfigError, match=r"data\.fields"):
        open_traces(SourceSettings(path=tmp_path / "a.jsonl", fields={"prompt": "x"}))


def test_best_sample_of_a_prompt_is_an_example_that_no_policy_sampled(tmp_path: Path) -> None:
    tokenizer = digits(tmp_path / "model")
    written(tmp_path, own(row="a", reward=0.5), own(row="a", reward=1.0), own(row="b", reward=None))
    source = open_traces(SourceSettings(path=tmp_path / "a.jsonl", options={"take": "best"}))
    assert [source[i].traces[0].reward for i in range(len(source))] == [1.0, None]
    made = TraceMaker(source, tokenizer, tokenizer.size, as_examples=True).of(source[0], 0)
    assert not made.is_sampled
    assert (made.trained.tolist(), made.logprobs.tolist()) == ([True, True], [0, 0])


def test_row_of_several_samples_is_no_example(tmp_path: Path) -> None:
    tokenizer, source = digits(tmp_path / "model"), written(tmp_path, own(), own())
    with pytest.raises(TraceError, match=r"2 samples.*data\.options\.take"):
        TraceMaker(source, tokenizer, tokenizer.size, as_examples=True).of(source[0], 0)


def test_each_sample_may_be_a_row_and_other_options_are_refused(tmp_path: Path) -> None:
    written(tmp_path, own(row="a"), own(row="a"))
    assert len(open_traces(SourceSettings(path=tmp_path / "a.jsonl", options={"take": "each"}))) == 2
    for options in ({"take": "worst"}, {"best": True}):
        with pytest.raises(ConfigError, match="take, one of row, each, best"):
            open_traces(SourceSettings(path=tmp_path / "a.jsonl", options=options))
