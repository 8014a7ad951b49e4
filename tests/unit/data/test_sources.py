"""What each kind of data source reads, refuses, and reports about a malformed row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.data.sources import open_source
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError, RowError
from tests.support.data_files import ROWS, TASKS, jsonl_of, module_of, parquet_of


def all_of(source: Any) -> list[Task]:
    return [source[i] for i in range(len(source))]


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(tmp_path)
    return module_of(tmp_path)


def test_every_row_of_a_jsonl_file_is_a_task(tmp_path: Path) -> None:
    assert all_of(open_source("jsonl", path=jsonl_of(tmp_path, *ROWS))) == TASKS


@pytest.mark.parametrize("group", [1, 3, 100])
def test_every_row_of_a_parquet_file_is_a_task(tmp_path: Path, group: int) -> None:
    assert all_of(open_source("parquet", path=parquet_of(tmp_path, ROWS, group))) == TASKS


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_size_beyond_the_file_takes_all_rows(tmp_path: Path, kind: str) -> None:
    path = jsonl_of(tmp_path, *ROWS) if kind == "jsonl" else parquet_of(tmp_path, ROWS)
    assert all_of(open_source(kind, path=path, size=40)) == TASKS


@given(
    rows=st.lists(st.dictionaries(st.text("abc", max_size=3), st.text() | st.integers(), max_size=3), min_size=1),
    order=st.randoms(use_true_random=False),
    newline=st.sampled_from([b"\n", b"\r\n", b"\n \n\n"]),
    last=st.booleans(),
)
def test_jsonl_items_are_the_same_in_any_order_of_access(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, Any]],
    order: Any,
    newline: bytes,
    last: bool,  # noqa: FBT001
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    encoded = newline.join(
        json.dumps({**row, "prompt": f"p{i}"}, ensure_ascii=False).encode("utf-8", "replace")
        for i, row in enumerate(rows)
    )
    path.write_bytes(encoded + newline * last)
    source = open_source("jsonl", path=path)
    assert len(source) == len(rows)
    indices = list(range(len(rows)))
    order.shuffle(indices)
    assert [source[i].prompt for i in indices] == [f"p{i}" for i in indices]
    assert all_of(source) == all_of(open_source("jsonl", path=path))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b'{"prompt": "cut', r"line 3: no JSON .* column 12\); write one JSON object a line"),
        (b'{"prompt": "cut"', r"line 3: no JSON .* column 17\); write one JSON object a line"),
        (b'["prompt"]', "line 3: a list, not an object"),
        (b"null", "line 3: nothing .null., not an object"),
        (b"\xff\xfe", "line 3: no UTF-8"),
        (b'{"n": ' + b"1" * 5000 + b"}", "line 3: no JSON that Python reads"),
        (b"[" * 100_000, "line 3: nested too deeply"),
        (b'{"prompt": "x", "n": ' + b"[" * 900 + b"]" * 900 + b"}", "line 3: nested too deeply"),
        (b'{"question": "x", "answer": "y"}', "line 3: no field 'prompt'; fields found: question, answer; set data"),
        (b'{"prompt": 5}', "line 3, field 'prompt': an int, neither a text nor a list of messages"),
        (b'{"prompt": null}', "line 3, field 'prompt': nothing"),
        (b'{"prompt": {"role": "user"}}', "line 3, field 'prompt': an object with role, neither"),
        (b'{"prompt": ""}', "line 3, field 'prompt': empty"),
        (b'{"prompt": " \\n"}', "line 3, field 'prompt': empty"),
        (b'{"prompt": []}', "line 3, field 'prompt': empty"),
        (b'{"prompt": "\\ud800"}', "line 3, field 'prompt': half a surrogate pair"),
        (b'{"prompt": [{"role": "user", "content": ""}]}', "line 3, field 'prompt': empty"),
        (b'{"prompt": ["hello"]}', "line 3, field 'prompt', message 1: a str"),
        (b'{"prompt": [{"role": "user"}]}', "message 1: an object with role that is not"),
        (b'{"prompt": [{"role": "user", "content": ["x"]}]}', "message 1: an object with role, content that is not"),
    ],
)
def test_a_malformed_line_is_reported_with_its_place_and_reason(tmp_path: Path, bad: bytes, said: str) -> None:
    path = jsonl_of(tmp_path, ROWS[0], ROWS[1], bad, ROWS[3])
    source = open_source("jsonl", path=path)
    with pytest.raises(RowError, match=said) as caught:
        source[2]
    assert str(path) in str(caught.value)
    assert [source[0], source[1], source[3]] == [TASKS[0], TASKS[1], TASKS[3]]


def test_line_numbers_count_blank_lines(tmp_path: Path) -> None:
    source = open_source("jsonl", path=jsonl_of(tmp_path, b"", ROWS[0], b"  ", b"{"))
    assert len(source) == 2
    with pytest.raises(RowError, match="line 4"):
        source[1]


def test_a_byte_order_mark_is_not_part_of_the_row(tmp_path: Path) -> None:
    assert open_source("jsonl", path=jsonl_of(tmp_path, b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode()))[0] == TASKS[0]


def test_a_chat_is_a_prompt(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "Hello"}]
    assert open_source("jsonl", path=jsonl_of(tmp_path, {"prompt": chat}))[0] == Task(chat)
    with_null = [{**message, "name": None} for message in chat]
    assert open_source("parquet", path=parquet_of(tmp_path, [{"prompt": with_null}]))[0] == Task(chat)


@pytest.mark.parametrize(("answer", "text"), [(42, "42"), (1.5, "1.5"), (None, ""), (["a", 1], '["a", 1]'), ("é", "é")])
def test_an_answer_that_is_not_text_becomes_json(tmp_path: Path, answer: object, text: str) -> None:
    assert open_source("jsonl", path=jsonl_of(tmp_path, {"prompt": "p", "answer": answer}))[0].answer == text


def test_the_fields_of_prompt_and_answer_are_configurable(tmp_path: Path) -> None:
    path = jsonl_of(tmp_path, {"q": "Why?", "a": "So.", "answer": "other"})
    source = open_source("jsonl", path=path, fields={"prompt": "q", "answer": "a"})
    assert source[0] == Task("Why?", "So.")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_that_is_missing_empty_or_a_folder_is_a_config_error(tmp_path: Path, kind: Any) -> None:
    (tmp_path / "empty").touch()
    for name, said in [("absent", "does not exist"), ("empty", "is empty"), (".", "is a folder without files")]:
        with pytest.raises(ConfigError, match=rf"^data.path = .* {said}"):
            open_source(kind, path=tmp_path / name)


def test_a_file_without_rows_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data.path = .* nothing but blank lines"):
        open_source("jsonl", path=jsonl_of(tmp_path, b"", b" "))
    path = tmp_path / "none.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(ConfigError, match=r"^data.path = .* has no rows"):
        open_source("parquet", path=path)


def test_a_file_without_a_good_row_is_a_config_error_that_lists_its_fields(tmp_path: Path) -> None:
    rows = [{"question": "x", "solution": "y"}] * 5
    said = r"^data.path = .*not one of 5 rows is good: .*line 1: no field 'prompt'; fields found: question, solution; "
    with pytest.raises(ConfigError, match=said + r"set data.fields.prompt.* \(and 2 more\)"):
        open_source("jsonl", path=jsonl_of(tmp_path, *rows))
    with pytest.raises(ConfigError, match=r"'prompt'.*question, solution; set data.fields.prompt"):
        open_source("parquet", path=parquet_of(tmp_path, rows))


def test_a_file_that_is_not_parquet_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        open_source("parquet", path=jsonl_of(tmp_path, *ROWS))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.kind = 'csv' is not a known"):
        open_source("csv")


def test_a_reasoning_gym_source_is_a_function_of_its_settings() -> None:
    first = open_source("reasoning_gym", task="chain_sum", size=20, seed=7, options={"max_terms": 3})
    again = open_source("reasoning_gym", task="chain_sum", size=20, seed=7, options={"max_terms": 3})
    assert len(first) == 20
    assert [again[i] for i in reversed(range(20))] == all_of(first)[::-1]
    assert all_of(open_source("reasoning_gym", task="chain_sum", size=20, seed=8)) != all_of(first)


def test_a_reasoning_gym_task_carries_the_entry_for_its_scorer() -> None:
    task = open_source("reasoning_gym", task="chain_sum", size=1, seed=1, options={"max_terms": 3})[0]
    entry = task.metadata["entry"]
    assert (task.prompt, task.answer) == (entry["question"], entry["answer"])
    assert task.metadata["source_dataset"] == entry["metadata"]["source_dataset"] == "chain_sum"
    assert task.metadata["options"] == {"max_terms": 3}
    assert msgpack.unpackb(msgpack.packb(task.metadata)) == task.metadata


def test_a_task_without_a_single_answer_has_an_empty_answer() -> None:
    task = open_source("reasoning_gym", task="rush_hour", size=1)[0]
    assert task.answer == ""
    assert task.metadata["entry"]["answer"] is None


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("chain_sums", {}, r"^data.task = 'chain_sums' is not a task of reasoning-gym; did you mean chain_sum"),
        ("zzzzzz", {}, "use one of .*chain_sum, .*word_sorting"),
        ("chain_sum", {"max_term": 3}, r"^data.options = .*'chain_sum' refuses them .*max_term"),
        ("chain_sum", {"min_terms": 9, "max_terms": 3}, r"^data.options = .* refuses them .AssertionError"),
        ("chain_sum", {"seed": 3}, r"^data.options = .* refuses them .*seed"),
    ],
)
def test_wrong_reasoning_gym_settings_are_config_errors(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_source("reasoning_gym", task=name, options=options)


def test_a_function_gets_size_seed_and_options(functions: str) -> None:
    source = open_source("python", function=f"{functions}.sums", size=3, seed=5, options={"top": 2})
    assert all_of(source) == [Task(f"5 + {i}", str(5 + i), {"top": 2}) for i in range(3)]


def test_items_of_a_function_are_checked_one_by_one(functions: str) -> None:
    source = open_source("python", function=f"{functions}:pairs")
    assert (source[0], source[5]) == (Task("one", "1"), Task("six", "6"))
    for i, said in enumerate(["is neither a Task", "empty", "is neither", "is neither"], 1):
        with pytest.raises(RowError, match=rf"{functions}:pairs item {i + 1}: .*{said}"):
            source[i]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("constant", "is a int; name a function"),
        ("nothing", "returned no tasks"),
        ("lazily", "returned a generator; return a sequence"),
        ("failing", "raised OSError: no such host"),
        ("absent", "has no 'absent'"),
        ("sums", "raised TypeError: .*'?wrong'?"),
    ],
)
def test_a_function_that_returns_no_tasks_is_a_config_error(functions: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data.function = '{functions}.{name}'.*{said}"):
        open_source("python", function=f"{functions}.{name}", options={"wrong": 1} if name == "sums" else {})


def test_importing_sources_and_rewards_imports_nothing_heavy() -> None:
    code = (
        "import sys, relax_actors.data.sources, relax_actors.rewards\n"
        "print([m for m in ('torch', 'reasoning_gym', 'math_verify', 'pyarrow', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
