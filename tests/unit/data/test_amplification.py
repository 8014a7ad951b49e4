"""Small data that costs gigabytes or hours: bounded memory and time, and an error that names the place."""

from __future__ import annotations

import json
import resource
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from broker.store import Store
from relax_actors.config import validate
from relax_actors.data import parquet, prompt_maker
from relax_actors.data.character_tokenizer import make_character_tokenizer
from relax_actors.data.prompt_maker import PromptMaker
from relax_actors.data.sources import open_source
from relax_actors.data.task import Task
from relax_actors.data.time_limit import call_within
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import ActorError, ConfigError, RowError, SlowRowError
from relax_actors.training.warm_start import warm_start
from tests.support.messages import assert_says
from tests.support.running import wait_until

MIB = 1 << 20
GOOD = b'{"prompt": "p", "answer": "a"}\n'


@contextmanager
def bounded(mib: int, seconds: float) -> Iterator[None]:
    """Assert that the block takes at most so much memory of Python objects, and time."""
    began = time.monotonic()
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < mib * MIB
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < seconds


def test_line_of_100_megabytes_is_a_malformed_row_and_never_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(GOOD + b'{"prompt": [')
        for _ in range(100):
            file.write(b"[],[]," * (MIB // 6))
        file.write(b"]}\n" + GOOD)
    with bounded(32, 20):
        source = open_source("jsonl", path=path)
        assert (len(source), source[0], source[2]) == (3, Task("p", "a"), Task("p", "a"))
        with pytest.raises(RowError) as caught:
            source[1]
    assert_says(caught.value, f"{path} line 2", "longer than 4 MiB", "one JSON object a line")


def test_file_of_one_endless_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.truncate(256 * MIB)  # zeros, without a newline
    with bounded(32, 20), pytest.raises(ConfigError, match=r"not one of 1 rows is good: .*line 1: longer than 4 MiB"):
        open_source("jsonl", path=path)


@pytest.mark.slow
def test_megabytes_of_empty_lists_take_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "p", "x": [' + b"[]," * (MIB // 8) + b"[]]}\n")
    with bounded(50, 60):
        task = open_source("jsonl", path=path)[0]
    assert len(task.metadata["x"]) == MIB // 8 + 1


def write_repeated(path: Path, value: str, rows: int) -> None:
    """Write a file in which all prompts are one value of a dictionary."""
    values = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))
    table = pa.table({"prompt": values})
    pq.write_table(table, path, store_schema=False, dictionary_pagesize_limit=1 << 30, compression="zstd")


@pytest.mark.slow
def test_parquet_that_repeats_a_long_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.parquet"
    write_repeated(path, "x" * (900 << 10), 20_000)
    assert path.stat().st_size < 100 << 10
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 256 * MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError) as caught:
        open_source("parquet", path=path)
    errors = [
        f"{path} row {row}: row group 0 has more than 10000000 rows or 0 GiB in memory; write the file again with "
        "smaller row groups (row_group_size of pyarrow.parquet.write_table)"
        for row in (1, 2, 3)
    ]
    tried = f"not one of the first 10000 rows is good: {' | '.join(errors)} (and 9997 more)"
    assert str(caught.value) == f"data.path = {str(path)!r}: {tried}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB; of 17 GiB


@pytest.mark.slow
def test_parquet_with_a_large_dictionary_is_decoded_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.parquet"
    write_repeated(path, "x" * (64 * MIB), 256)
    assert path.stat().st_size < MIB
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 128 * MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=r"not one of 256 rows is good: .*row group 0 has more than"):
        open_source("parquet", path=path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20  # KiB; of 16 GiB


def test_parquet_with_billions_of_rows_of_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nulls.parquet"
    pq.write_table(pa.table({"prompt": pa.nulls(200_000, pa.string())}), path)
    monkeypatch.setattr(parquet, "MAX_GROUP_ROWS", 100_000)
    with bounded(64, 20), pytest.raises(ConfigError, match=r"not one of the first 10000 rows is good: .*row group 0"):
        open_source("parquet", path=path)


def test_parquet_row_of_many_megabytes_is_a_malformed_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "picture": [b"", bytes(8 * MIB)]}), path)
    source = open_source("parquet", path=path)
    assert source[0].prompt == "a"
    with pytest.raises(RowError) as caught:
        source[1]
    assert_says(caught.value, f"{path} row 2", "more than the 4 MiB", "remove columns")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    ids = make_character_tokenizer("0123456789 abcdefghijklmnopqrstuvwxyz:#", "#", folder)
    (folder / "config.json").write_text(json.dumps(ids))
    return folder


def maker(folder: Path, **data: Any) -> PromptMaker:
    body = {"model": {"path": str(folder)}, "data": {"kind": "jsonl", **data}, "run": {"name": "x"}}
    return PromptMaker(validate(body, "t").data, Tokenizer(folder), 1000, 10)


def error_of(made: PromptMaker, task: Task) -> str:
    with pytest.raises(RowError) as caught:
        made.make(task, seed=0, min_version=0)
    return str(caught.value)


TASK = Task("why", origin="rows.jsonl line 7")


def test_chat_template_that_raises_blames_the_row_and_itself(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ raise_exception('no system\x1b message') }}")
    words = ("rows.jsonl line 7: prompt", f"template of {model}", "TemplateError: no system\x1b message", "data.chat")
    assert_says(error_of(maker(model), TASK), *words)


def test_chat_template_that_loops_is_given_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(prompt_maker, "MAX_SECONDS", 0.5)
    (model / "chat_template.jinja").write_text("{% if messages[0].content == 'loop' %}" + template + "{% endif %}ok")
    made = maker(model)
    assert made.make(TASK, seed=0, min_version=0).text == "ok"
    with pytest.raises(SlowRowError) as caught:
        made.make(Task("loop", origin="rows.jsonl line 8"), seed=0, min_version=0)
    assert_says(caught.value, "rows.jsonl line 8: prompt", "did not end within 0.5 s", "remove the row")
    assert made.make(TASK, seed=0, min_version=0).text == "ok"
    wait_until(lambda: [t.name for t in threading.enumerate()].count("time-limit") == 1, "end of the looping thread")


def test_warm_start_does_not_skip_a_row_that_takes_too_long(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which rows it trains must not depend on the load of the machine."""
    monkeypatch.setattr(prompt_maker, "MAX_SECONDS", 0.2)
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    shape = {"model_type": "qwen3"} | dict.fromkeys(sizes, 64)
    (model / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | shape))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "loop", "answer": "1"}\n')
    body = {
        "model": {"path": str(model)},
        "data": {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")},
        "trainer": {"warm_start": {"steps": 1, "rows": 1}},
    }
    engine: Any = None  # no step is taken
    with pytest.raises(ActorError) as caught:
        warm_start(validate(body, "t"), engine, lambda: None, Store(tmp_path / "store"))
    words = ("warm start", f"{tmp_path / 'rows.jsonl'} line 1: prompt", "did not end within 0.2 s", "remove the row")
    assert_says(caught.value, *words)


def test_chat_template_that_writes_megabytes_is_refused(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for a in range(9999) %}{{ 'a' * 1000 }}{% endfor %}")
    words = ("rows.jsonl line 7", "9999008 bytes", "the 4128768 that a cell holds", "remove fields")
    assert_says(error_of(maker(model), TASK), *words)


def test_answer_and_metadata_that_fit_in_no_cell_name_the_row(model: Path) -> None:
    for task in (Task("why", "x" * 5 * MIB, origin="f line 1"), Task("why", "", {"x": ["y"] * 5 * MIB}, "f line 1")):
        said = error_of(maker(model), task)
        assert said.startswith("f line 1: prompt, answer and metadata have ")
        assert said.endswith(" that a cell holds; remove fields that the reward does not need")


def test_tokenizer_whose_pattern_backtracks_is_bounded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<u>": 1}, unk_token="<u>"))  # noqa: S106 no password
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a|aa)+$"), "isolated")
    inner.save(str(model / "tokenizer.json"))
    monkeypatch.setattr(prompt_maker, "MAX_SECONDS", 2.0)
    began = time.monotonic()
    with pytest.raises(RowError, match=r"^rows.jsonl line 7: prompt: "):
        maker(model).make(Task("a" * 500 + "b", origin="rows.jsonl line 7"), seed=0, min_version=0)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", "[" * 10_000, "config.json cannot be read (RecursionError: "),
        ("config.json", "[1]", "config.json holds a list, not an object; download the model again"),
        ("config.json", '{"eos_token_id": "x"}', "config.json: eos_token_id holds 'x', which is no token id; write a "),
        ("config.json", '{"eos_token_id": [1, [2]]}', "config.json: eos_token_id holds [2], which is no token id; "),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}, "merges": [["a"]]}}', "is not a tokenizer: "),
        ("tokenizer.json", "[" * 200_000, "is not a tokenizer: "),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read (JSONDecodeError: "),
    ],
)
def test_damaged_files_of_a_model_are_named(model: Path, name: str, text: str, said: str) -> None:
    (model / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        tokenizer = Tokenizer(model)
        assert tokenizer.has_chat_template is not None
        assert tokenizer.stop_ids is not None
    assert str(model) in str(caught.value)
    assert said in str(caught.value)


def test_what_is_no_exception_reaches_the_caller_as_one() -> None:
    def panic() -> None:
        raise BaseException("entered unreachable code")  # noqa: TRY002 as a Rust library raises

    with pytest.raises(RuntimeError, match=r"^BaseException: entered unreachable code$"):
        call_within(10, panic)
    assert call_within(10, lambda: 3) == 3


def test_a_call_that_ran_out_of_time_does_not_reach_later_calls() -> None:
    def spin() -> None:
        while True:
            pass

    assert call_within(10, threading.current_thread) is call_within(10, threading.current_thread)
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"^not done after 0\.01 s$"):
            call_within(0.01, spin)
        assert call_within(10, lambda: 3) == 3
