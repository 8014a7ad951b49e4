"""Small data sets for tests of data sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from relax_actors.data.task import Task

ROWS: list[dict[str, Any]] = [
    {"prompt": f"What is {i} + {i}?", "answer": str(2 * i), "level": i, "tags": ["sum"]} for i in range(10)
]
TASKS = [Task(row["prompt"], row["answer"], {"level": row["level"], "tags": ["sum"]}) for row in ROWS]

FUNCTIONS = """
from relax_actors.data.task import Task

constant = 3
def sums(size, seed, top=10):
    return [Task(f"{seed} + {i}", str(seed + i), {"top": top}) for i in range(size)]
def pairs(size, seed):
    return [("one", "1"), [{"role": "user", "content": "two"}], ("", "3"), ("four", 4), 5, ("six", "6")]
def third_is_empty(size, seed):
    return [("one", "1"), ("two", "2"), ("", "3"), ("four", "4")]
def numbers(size, seed):
    return [1, 2, 3]
def nothing(size, seed):
    return []
def lazily(size, seed):
    yield Task("one")
def failing(size, seed):
    raise OSError("no such host")
"""


def jsonl_of(folder: Path, *rows: object) -> Path:
    """Write rows, or lines as bytes, as JSON Lines."""
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return path


def parquet_of(folder: Path, rows: list[dict[str, Any]], group: int = 3) -> Path:
    """Write rows as Parquet, in row groups of `group`."""
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def arrow_of(folder: Path, rows: list[dict[str, Any]], form: str = "stream", batch: int = 3) -> Path:
    """Write rows as Arrow in the format `stream` or `file`, in record batches of `batch`."""
    path = folder / "rows.arrow"
    table = pa.Table.from_pylist(rows)
    make = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def module_of(folder: Path) -> str:
    """Write `FUNCTIONS` as a module with a name of its own; `folder` must be on the path to import it."""
    name = "functions_" + "".join(c if c.isalnum() else "_" for c in folder.name)
    (folder / f"{name}.py").write_text(FUNCTIONS)
    return name
