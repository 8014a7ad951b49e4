"""Files, folders, patterns, splits and slices of data sources, and the names of their fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relax_actors.data.sources import open_source
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError, RowError
from tests.support.data_files import ROWS, TASKS, arrow_of, jsonl_of, parquet_of


def all_of(source: Any) -> list[Task]:
    return [source[i] for i in range(len(source))]


def split_up(folder: Path, *names: str) -> Path:
    """Write the rows to files, in equal shares."""
    share = len(ROWS) // len(names)
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        own = ROWS[number * share : (number + 1) * share]
        (jsonl_of if path.suffix == ".jsonl" else parquet_of)(path.parent, *([own] if path.suffix != ".jsonl" else own))
        (path.parent / f"rows{path.suffix}").rename(path)
    return folder


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_files_of_a_folder_are_read_in_the_order_of_their_names(tmp_path: Path, ending: str) -> None:
    folder = split_up(tmp_path / "data", f"a/2.{ending}", f"a/3.{ending}")
    (folder / "a" / f"1.{ending}").touch()  # an empty file has no rows
    (folder / "README.md").write_text("no data")
    assert all_of(open_source(ending, path=folder)) == TASKS
    assert all_of(open_source(ending, path=folder / "a" / f"[23].{ending}")) == TASKS
    assert all_of(open_source(ending, path=folder / "**" / f"2.{ending}")) == TASKS[:5]
    source = open_source(ending, path=folder, size=7)
    assert all_of(source) == TASKS[:7]
    assert source[6].origin.startswith(str(folder / "a" / f"3.{ending}"))


def test_split_chooses_files_by_name(tmp_path: Path) -> None:
    folder = split_up(tmp_path, "data/test-00000-of-00001.parquet", "data/train-00000-of-00001.parquet")
    assert all_of(open_source("parquet", path=folder, split="train")) == TASKS[5:]
    with pytest.raises(ConfigError, match=r"splits test, train; choose one by data\.split"):
        open_source("parquet", path=folder)
    with pytest.raises(ConfigError, match=r"data\.split = 'dev'.*no such files.*test-00000-of-00001"):
        open_source("parquet", path=folder, split="dev")


def test_folder_with_held_out_files_beside_others_is_read_only_with_a_choice(tmp_path: Path) -> None:
    folder = split_up(tmp_path / "held", "data.jsonl", "test.jsonl")
    with pytest.raises(ConfigError, match=r"split test .*choose one by data\.split"):
        open_source("jsonl", path=folder)
    assert len(open_source("jsonl", path=split_up(tmp_path / "more", "extra.jsonl", "train.jsonl"))) == 10


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("train/0.jsonl", "test/0.jsonl"), "test, train"),
        (("train.jsonl", "validation.jsonl"), "train, validation"),
        (("a/train_sums.jsonl", "a/val/sums.jsonl"), "train, val"),
        (("train/data-00000-of-00001.jsonl", "dev/data-00000-of-00001.jsonl"), "dev, train"),
    ],
)
def test_folder_with_several_splits_is_read_only_with_a_choice(
    tmp_path: Path, names: tuple[str, str], splits: str
) -> None:
    folder = split_up(tmp_path / "data", *names)
    with pytest.raises(ConfigError, match=rf"splits {splits}; choose one by data\.split"):
        open_source("jsonl", path=folder)
    assert all_of(open_source("jsonl", path=folder, split="train")) == TASKS[:5]
    assert len(open_source("jsonl", path=folder / "**" / "*.jsonl")) == 10


def test_folder_whose_files_are_all_of_one_split_needs_no_choice(tmp_path: Path) -> None:
    folder = split_up(tmp_path / "data", "train/data-00000-of-00002.jsonl", "train/data-00001-of-00002.jsonl")
    assert all_of(open_source("jsonl", path=folder)) == TASKS
    assert all_of(open_source("jsonl", path=folder / "train")) == TASKS


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    folder = split_up(tmp_path / ".cache" / "data", "a.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl")
    (folder / "._a.jsonl").write_bytes(b"\0\5\26\7")
    assert all_of(open_source("jsonl", path=folder)) == TASKS[:5]


def test_split_is_a_folder_that_a_pattern_names(tmp_path: Path) -> None:
    folder = split_up(tmp_path / "data", "g/train/0.jsonl", "g/test/0.jsonl")
    assert all_of(open_source("jsonl", path=folder / "g" / "*" / "*.jsonl", split="train")) == TASKS[:5]


def test_split_that_a_single_file_or_data_set_is_not_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path = jsonl_of(tmp_path, *ROWS)
    with pytest.raises(ConfigError, match=r"data\.split = 'nonsense'.*rows\.jsonl' has no such"):
        open_source("jsonl", path=path, split="nonsense")
    assert all_of(open_source("jsonl", path=path.rename(tmp_path / "train.jsonl"), split="train")) == TASKS
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    with pytest.raises(ConfigError, match=r"data\.split = 'nonsense'.*/one' is a single data set"):
        open_source("arrow", path=tmp_path / "one", split="nonsense")
    named = datasets.Dataset.from_list(ROWS, split="train")
    named.save_to_disk(tmp_path / "named")
    assert all_of(open_source("arrow", path=tmp_path / "named", split="train")) == TASKS


def test_path_that_leads_to_no_file_is_refused_with_near_names(tmp_path: Path) -> None:
    jsonl_of(tmp_path, *ROWS)
    with pytest.raises(ConfigError, match=r"did you mean 'rows\.jsonl'"):
        open_source("jsonl", path=tmp_path / "row.jsonl")
    with pytest.raises(ConfigError, match=r"matches no file"):
        open_source("jsonl", path=tmp_path / "*.json")
    with pytest.raises(ConfigError, match=r"without files \*\.parquet; it has rows\.jsonl"):
        open_source("parquet", path=tmp_path)


def test_data_set_that_was_saved_by_hugging_face_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": one, "test": one.select([3])}).save_to_disk(tmp_path / "dict")
    assert all_of(open_source("arrow", path=tmp_path / "one")) == TASKS
    assert all_of(open_source("arrow", path=tmp_path / "dict", split="test")) == TASKS[3:4]
    with pytest.raises(ConfigError, match=r"data\.split is not set.*splits train, test"):
        open_source("arrow", path=tmp_path / "dict")
    next((tmp_path / "one").glob("data-00001*")).unlink()
    with pytest.raises(ConfigError, match=r"lacks data-00001-of-00003\.arrow, which its state\.json names"):
        open_source("arrow", path=tmp_path / "one")


def test_broken_arrow_file_is_refused_with_the_place(tmp_path: Path) -> None:
    path = arrow_of(tmp_path, ROWS)
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(ConfigError, match=r"rows\.arrow' cannot be read as Arrow .*record batch \d"):
        open_source("arrow", path=path)
    path.write_text("text")
    with pytest.raises(ConfigError, match="cannot be read as Arrow"):
        open_source("arrow", path=path)


def test_corrupt_row_group_spares_the_others_and_is_named_with_file_and_number(tmp_path: Path) -> None:
    path = parquet_of(tmp_path, ROWS, group=5)
    with pq.ParquetFile(path) as file:
        begin = file.metadata.row_group(1).column(0).dictionary_page_offset
    data = bytearray(path.read_bytes())
    data[begin : begin + 40] = b"\xff" * 40
    path.write_bytes(data)
    source = open_source("parquet", path=path)
    assert all_of(source_of_first(source, 5)) == TASKS[:5]
    with pytest.raises(RowError, match=r"rows\.parquet row 7: row group 1 of 2 cannot be read"):
        source[6]


@pytest.mark.parametrize("counts", [(3, 0, 3), (0, 3, 0, 0, 3, 0)])
def test_empty_row_groups_are_passed_over(tmp_path: Path, counts: tuple[int, ...]) -> None:
    table = pa.Table.from_pylist(ROWS[:6])
    with pq.ParquetWriter(tmp_path / "rows.parquet", table.schema) as writer:
        start = 0
        for count in counts:
            writer.write_table(table.slice(start, count), row_group_size=None)
            start += count
    assert pq.ParquetFile(tmp_path / "rows.parquet").metadata.num_row_groups == len(counts)
    source: Any = open_source("parquet", path=tmp_path / "rows.parquet")
    assert all_of(source) == TASKS[:6]
    assert source.blocks.sizes.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.date32(), 10**9),
        (pa.duration("s"), 1 << 62),
        (pa.timestamp("ms"), 1 << 62),
        (pa.timestamp("ms", tz="No/Zone"), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_value_that_python_cannot_hold_fails_its_row_alone(
    tmp_path: Path, form: str, kind: pa.DataType, value: int
) -> None:
    values = pa.array([None, value], pa.int32() if kind == pa.date32() else pa.int64()).cast(kind)
    table = pa.table({"prompt": ["a", "b"], "when": values})
    path = tmp_path / f"rows.{form}"
    if form == "arrow":
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, path)
    source: Any = open_source(form, path=path)
    assert source[0].prompt == "a"
    with pytest.raises(RowError, match=rf"rows\.{form} row 2: cannot be decoded"):
        source[1]


def source_of_first(source: Any, count: int) -> list[Task]:
    return [source[i] for i in range(count)]


@pytest.mark.parametrize(
    ("rows", "start", "stop"),
    [
        ("0:4", 0, 4),
        (":", 0, 10),
        ("-3:", 7, 10),
        ("2:-2", 2, 8),
        ("0%:90%", 0, 9),
        ("90%:100%", 9, 10),
        ("5:99", 5, 10),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_slice_takes_rows_by_number_or_share(tmp_path: Path, kind: str, rows: str, start: int, stop: int) -> None:
    path = jsonl_of(tmp_path, *ROWS) if kind == "jsonl" else parquet_of(tmp_path, ROWS)
    source: Any = open_source(kind, path=path, rows=rows)
    assert all_of(source) == TASKS[start:stop]
    if kind == "parquet":
        assert source.blocks.sizes.sum() == stop - start


@pytest.mark.parametrize(
    ("rows", "said"),
    [("5:5", "takes none of the 10 rows"), ("5", "is no slice"), ("a:b", "is no slice"), ("1:2:3", "is no slice")],
)
def test_slice_without_rows_is_refused(tmp_path: Path, rows: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.rows = '{rows}' {said}"):
        open_source("jsonl", path=jsonl_of(tmp_path, *ROWS), rows=rows)


NESTED = {"q": {"text": "Why?"}, "solutions": [{"final": "So."}, {"final": "No."}], "subject": "logic", "other": 1}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_fields_of_any_data_set_get_our_names(tmp_path: Path, kind: str) -> None:
    write = {"jsonl": lambda: jsonl_of(tmp_path, NESTED), "parquet": lambda: parquet_of(tmp_path, [NESTED])}
    path = write.get(kind, lambda: arrow_of(tmp_path, [NESTED]))()
    fields = {"prompt": "q.text", "answer": "solutions.1.final", "category": "subject"}
    task = open_source(kind, path=path, fields=fields)[0]
    assert (task.prompt, task.answer) == ("Why?", "No.")
    assert task.metadata == {"q": NESTED["q"], "solutions": NESTED["solutions"], "other": 1, "category": "logic"}


def test_messages_are_the_prompt_of_a_row_without_one(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    assert open_source("jsonl", path=jsonl_of(tmp_path, {"messages": chat}))[0] == Task(chat)
    assert open_source("parquet", path=parquet_of(tmp_path, [{"messages": chat}]))[0] == Task(chat)
    named = open_source(
        "jsonl", path=jsonl_of(tmp_path, {"talk": chat, "prompt": "other"}), fields={"messages": "talk"}
    )
    assert named[0].prompt == chat


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_messages_may_have_the_names_of_share_gpt(tmp_path: Path, name: str) -> None:
    said = [("system", "Be kind."), ("human", "Hello"), ("gpt", "Hi")]
    path = jsonl_of(tmp_path, {name: [{"from": role, "value": text} for role, text in said]})
    roles = ("system", "user", "assistant")
    chat = [{"role": role, "content": text} for role, (_, text) in zip(roles, said, strict=True)]
    assert open_source("jsonl", path=path)[0] == Task(chat)


def test_field_with_a_dot_in_its_name_is_found(tmp_path: Path) -> None:
    source = open_source("jsonl", path=jsonl_of(tmp_path, {"a.b": "Why?"}), fields={"prompt": "a.b"})
    assert source[0] == Task("Why?")


def test_row_that_lacks_a_named_answer_has_none(tmp_path: Path) -> None:
    path = jsonl_of(tmp_path, {"prompt": "a", "solution": "1"}, {"prompt": "b", "answer": "2"})
    assert [task.answer for task in all_of(open_source("jsonl", path=path, fields={"answer": "solution"}))] == ["1", ""]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"answer": "solutoin"},
            r"fields\.answer = 'solutoin', but .* \d+ rows have no such field; .*= \"solution\"",
        ),
        ({"answer": "meta.lvl"}, r'fields found: .*meta\.level.*; set data\.fields\.answer = "meta\.level"'),
        ({"prompt": "questoin"}, r'set data\.fields\.prompt = "question"'),
        ({"prompt": ""}, r"data\.fields\.prompt is empty"),
        ({"prompt": "question", "messages": "question"}, "names both a prompt and messages"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_unknown_field_is_refused_with_near_names(tmp_path: Path, kind: str, fields: dict[str, str], said: str) -> None:
    rows = [{"question": "x", "solution": "y", "meta": {"level": 1}}] * 5
    path = jsonl_of(tmp_path, *rows) if kind == "jsonl" else parquet_of(tmp_path, rows)
    with pytest.raises(ConfigError, match=said):
        open_source(kind, path=path, fields={"prompt": "question"} | fields)


def test_error_of_a_source_of_a_mixture_names_it(tmp_path: Path) -> None:
    parts = {
        "good": {"kind": "jsonl", "path": jsonl_of(tmp_path, *ROWS)},
        "bad": {"kind": "jsonl", "path": tmp_path / "x"},
    }
    with pytest.raises(ConfigError, match=r"^data\.mixture\.bad: data\.path = .* does not exist"):
        open_source("mixture", mixture=parts)
    sources = open_source("mixture", mixture={"good": parts["good"], "again": parts["good"] | {"rows": "0:1"}})
    assert [task.metadata["source"] for task in all_of(sources)] == ["good"] * 10 + ["again"]


def test_source_of_a_mixture_is_named_in_place_of_a_field_of_the_row(tmp_path: Path) -> None:
    part = {"kind": "jsonl", "path": jsonl_of(tmp_path, {"prompt": "1", "source": "web", "url": "x"})}
    source = open_source("mixture", mixture={"a": part, "b": part | {"fields": {"origin": "source"}}})
    assert source[0].metadata == {"source": "a", "url": "x"}
    assert source[1].metadata == {"source": "b", "origin": "web", "url": "x"}


def test_compressed_arrow_beyond_the_limit_of_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_actors.data.arrow.MAX_DECODED_BYTES", 1 << 20)
    table = pa.table({"prompt": ["x" * (1 << 20)] * 8})
    path = tmp_path / "rows.arrow"
    with pa.ipc.new_file(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table, max_chunksize=1)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ConfigError, match=r"compressed.*more than 1 MiB"):
        open_source("arrow", path=path)


def test_rows_of_a_function_may_be_objects_with_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rows_of_objects.py").write_text(f"def make(size, seed):\n    return [{json.dumps(NESTED)}]\n")
    source = open_source("python", function="rows_of_objects.make", fields={"prompt": "q.text", "answer": "subject"})
    assert (source[0].prompt, source[0].answer) == ("Why?", "logic")
