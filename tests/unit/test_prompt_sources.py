"""Every kind of source yields the same tasks again, and says which row is bad and why."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.data.plain import plain
from relax_actors.data.source import DataSource
from relax_actors.data.sources import open_source
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError, RowError

ROWS: list[dict[str, Any]] = [
    {"prompt": f"What is {i} + {i}?", "answer": str(2 * i), "level": i, "tags": ["sum"]} for i in range(10)
]
TASKS = [Task(row["prompt"], row["answer"], {"level": row["level"], "tags": ["sum"]}) for row in ROWS]


def lines(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return path


def table(tmp_path: Path, rows: list[dict[str, Any]], group: int = 3) -> Path:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def all_of(source: DataSource) -> list[Task]:
    return [source[i] for i in range(len(source))]


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "functions_" + "".join(c if c.isalnum() else "_" for c in tmp_path.name)
    (tmp_path / f"{name}.py").write_text("""
from relax_actors.data.task import Task

constant = 3
def sums(size, seed, top=10):
    return [Task(f"{seed} + {i}", str(seed + i), {"top": top}) for i in range(size)]
def pairs(size, seed):
    return [("one", "1"), [{"role": "user", "content": "two"}], ("", "3"), ("four", 4), 5, ("six", "6")]
def nothing(size, seed):
    return []
def lazily(size, seed):
    yield Task("one")
def failing(size, seed):
    raise OSError("no such host")
""")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_every_row_of_a_jsonl_file_is_a_task(tmp_path: Path) -> None:
    assert all_of(open_source("jsonl", path=lines(tmp_path, *ROWS))) == TASKS


@pytest.mark.parametrize("group", [1, 3, 100])
def test_every_row_of_a_parquet_file_is_a_task(tmp_path: Path, group: int) -> None:
    assert all_of(open_source("parquet", path=table(tmp_path, ROWS, group))) == TASKS


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_size_takes_the_first_rows_of_a_file(tmp_path: Path, kind: Any) -> None:
    path = lines(tmp_path, *ROWS) if kind == "jsonl" else table(tmp_path, ROWS)
    assert all_of(open_source(kind, path=path, size=4)) == TASKS[:4]
    assert all_of(open_source(kind, path=path, size=40)) == TASKS


@given(
    rows=st.lists(st.dictionaries(st.text("abc", max_size=3), st.text() | st.integers(), max_size=3), min_size=1),
    order=st.randoms(use_true_random=False),
    newline=st.sampled_from([b"\n", b"\r\n", b"\n \n\n"]),
    last=st.booleans(),
)
def test_items_are_the_same_in_any_order_of_access(
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
        (b'{"prompt": "cut', "line 3: no JSON .*; write one JSON object a line"),
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
def test_a_bad_line_says_where_and_why_and_spares_the_others(tmp_path: Path, bad: bytes, said: str) -> None:
    path = lines(tmp_path, ROWS[0], ROWS[1], bad, ROWS[3])
    source = open_source("jsonl", path=path)
    with pytest.raises(RowError, match=said) as caught:
        source[2]
    assert str(path) in str(caught.value)
    assert [source[0], source[1], source[3]] == [TASKS[0], TASKS[1], TASKS[3]]


def test_line_numbers_count_blank_lines(tmp_path: Path) -> None:
    source = open_source("jsonl", path=lines(tmp_path, b"", ROWS[0], b"  ", b"{"))
    assert len(source) == 2
    with pytest.raises(RowError, match="line 4"):
        source[1]


def test_a_byte_order_mark_is_no_part_of_the_row(tmp_path: Path) -> None:
    assert open_source("jsonl", path=lines(tmp_path, b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode()))[0] == TASKS[0]


def test_a_chat_is_a_prompt(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "Hello"}]
    assert open_source("jsonl", path=lines(tmp_path, {"prompt": chat}))[0] == Task(chat)
    with_null = [{**message, "name": None} for message in chat]
    assert open_source("parquet", path=table(tmp_path, [{"prompt": with_null}]))[0] == Task(chat)


@pytest.mark.parametrize(("answer", "text"), [(42, "42"), (1.5, "1.5"), (None, ""), (["a", 1], '["a", 1]'), ("é", "é")])
def test_an_answer_that_is_no_text_is_its_json(tmp_path: Path, answer: object, text: str) -> None:
    assert open_source("jsonl", path=lines(tmp_path, {"prompt": "p", "answer": answer}))[0].answer == text


def test_prompt_and_answer_may_have_other_names(tmp_path: Path) -> None:
    path = lines(tmp_path, {"q": "Why?", "a": "So.", "answer": "other"})
    source = open_source("jsonl", path=path, prompt_field="q", answer_field="a")
    assert source[0] == Task("Why?", "So.", {"answer": "other"})


def test_a_bad_parquet_row_spares_the_others(tmp_path: Path) -> None:
    path = table(tmp_path, [ROWS[0], {**ROWS[1], "prompt": None}, ROWS[2]])
    source = open_source("parquet", path=path)
    with pytest.raises(RowError, match=r"rows.parquet row 2, field 'prompt': nothing"):
        source[1]
    assert [source[0], source[2]] == [TASKS[0], TASKS[2]]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_that_is_missing_empty_or_a_folder_is_a_config_error(tmp_path: Path, kind: Any) -> None:
    (tmp_path / "empty").touch()
    for name, said in [("absent", "does not exist"), ("empty", "is empty"), (".", "is a folder")]:
        with pytest.raises(ConfigError, match=rf"^data.path = .* {said}"):
            open_source(kind, path=tmp_path / name)


def test_a_file_without_rows_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data.path = .* nothing but blank lines"):
        open_source("jsonl", path=lines(tmp_path, b"", b" "))
    path = tmp_path / "none.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(ConfigError, match=r"^data.path = .* has no rows"):
        open_source("parquet", path=path)


def test_a_file_without_one_good_row_is_a_config_error_that_lists_its_fields(tmp_path: Path) -> None:
    rows = [{"question": "x", "solution": "y"}] * 5
    said = r"^data.path = .*not one of 5 rows is good: .*line 1: no field 'prompt'; fields found: question, solution; "
    with pytest.raises(ConfigError, match=said + r"set data.prompt_field.* \(and 2 more\)"):
        open_source("jsonl", path=lines(tmp_path, *rows))
    with pytest.raises(
        ConfigError, match=r"no column 'prompt'; columns found: question, solution; set data.prompt_field"
    ):
        open_source("parquet", path=table(tmp_path, rows))


def test_a_file_that_is_no_parquet_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        open_source("parquet", path=lines(tmp_path, *ROWS))


@pytest.mark.parametrize(
    ("kind", "name"), [("jsonl", "path"), ("parquet", "path"), ("reasoning_gym", "task"), ("python", "function")]
)
def test_a_setting_that_the_kind_needs_is_named(kind: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data.{name} is not set; data.kind = '{kind}' needs it"):
        open_source(kind)


def test_an_unknown_kind_and_a_size_of_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.kind = 'csv' is not a known data source"):
        open_source("csv")
    with pytest.raises(ConfigError, match=r"data.size = 0"):
        open_source("reasoning_gym", task="chain_sum", size=0)


@pytest.mark.parametrize(
    ("kind", "package", "extra"), [("reasoning_gym", "reasoning_gym", "tasks"), ("parquet", "pyarrow", "parquet")]
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # Python's own way to say "not there"
    said = rf"^data.kind = '{kind}' needs the package '{package}'; pip install 'relax-actors\[{extra}\]'"
    with pytest.raises(ConfigError, match=said):
        open_source(kind, path=tmp_path, task="chain_sum")


def test_a_reasoning_gym_source_is_a_function_of_its_settings() -> None:
    first = open_source("reasoning_gym", task="chain_sum", size=20, seed=7, options={"max_terms": 3})
    again = open_source("reasoning_gym", task="chain_sum", size=20, seed=7, options={"max_terms": 3})
    assert len(first) == 20
    assert [again[i] for i in reversed(range(20))] == all_of(first)[::-1]
    assert all_of(open_source("reasoning_gym", task="chain_sum", size=20, seed=8)) != all_of(first)


def test_a_reasoning_gym_task_carries_what_its_scorer_needs() -> None:
    task = open_source("reasoning_gym", task="chain_sum", size=1, seed=1, options={"max_terms": 3})[0]
    entry = task.metadata["entry"]
    assert (task.prompt, task.answer) == (entry["question"], entry["answer"])
    assert task.metadata["source_dataset"] == entry["metadata"]["source_dataset"] == "chain_sum"
    assert task.metadata["options"] == {"max_terms": 3}
    assert msgpack.unpackb(msgpack.packb(task.metadata)) == task.metadata


def test_a_task_without_one_answer_has_an_empty_one() -> None:
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


def test_a_functions_items_are_checked_one_by_one(functions: str) -> None:
    source = open_source("python", function=f"{functions}:pairs")
    assert (source[0], source[5]) == (Task("one", "1"), Task("six", "6"))
    for i, said in enumerate(["is neither a Task nor", "empty", "is neither", "is neither"], 1):
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
def test_a_function_that_gives_no_tasks_is_a_config_error(functions: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data.function = '{functions}.{name}'.*{said}"):
        open_source("python", function=f"{functions}.{name}", options={"wrong": 1} if name == "sums" else {})


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "reasoning_gym", "python"])
@pytest.mark.parametrize("i", [-1, 10])
def test_an_index_outside_is_an_index_error(tmp_path: Path, functions: str, kind: Any, i: int) -> None:
    path = table(tmp_path, ROWS) if kind == "parquet" else lines(tmp_path, *ROWS)
    source = open_source(kind, path=path, task="chain_sum", function=f"{functions}.sums", size=10)
    assert len(source) == 10
    with pytest.raises(IndexError, match=f"item {i} of a source of 10"):
        source[i]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, (2, 3)), [1, [2, 3]]),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"b", 1, None}), ["b", 1, None]),
        ({1: "a", (2, 3): "b", None: "c"}, {"1": "a", "[2, 3]": "b", "None": "c"}),
        (np.float32(0.5), 0.5),
        (np.str_("x"), "x"),
        (np.bool_(1), True),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (np.datetime64("2024-01-02"), "2024-01-02"),
        (np.longdouble(1.5), 1.5),
        (datetime(2024, 1, 2, tzinfo=UTC), "2024-01-02T00:00:00+00:00"),
        (timedelta(minutes=1), 60.0),
        (Fraction(1, 3), "1/3"),
        (1 << 64, "18446744073709551616"),
        (Task("p"), {"prompt": "p", "answer": "", "metadata": {}}),
        ("\ud800", "?"),
        (1j, "1j"),
    ],
)
def test_plain_data_is_what_a_reader_expects(value: object, expected: object) -> None:
    result = plain(value)
    assert (result, type(result)) == (expected, type(expected))


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.dates() | st.fractions()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(SCALARS, inner) | st.sets(SCALARS, max_size=4)
    ),
    max_leaves=10,
)


@given(VALUES)
def test_plain_data_survives_msgpack_and_is_its_own_plain_form(value: object) -> None:
    result = plain(value)
    assert msgpack.unpackb(msgpack.packb(result), strict_map_key=True) == result
    assert plain(result) == result


def test_importing_sources_and_rewards_imports_nothing_heavy() -> None:
    code = (
        "import sys, relax_actors.data.sources, relax_actors.rewards\n"
        "print([m for m in ('torch', 'reasoning_gym', 'math_verify', 'pyarrow', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
