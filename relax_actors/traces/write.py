"""Write traces to a file of JSON Lines or Parquet, or to a folder of JSON documents. They appear as a whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from relax_actors.errors import ConfigError
from relax_actors.registry.dotted import import_extra
from relax_actors.traces.exact_json import dumps
from relax_actors.traces.formats import FORMATS, PARQUET
from relax_actors.traces.model import Trace
from relax_actors.traces.parquet import schema

GROUP_ROWS = 256
"""Traces of a row group of Parquet, which are in memory at once."""
LINES = (".jsonl", ".ndjson")


def check_output(path: Path, kind: str) -> None:
    """Check that traces can be written to a path.

    Raises:
        ConfigError: the format is unknown, the path exists, its folder does not, or pyarrow is not installed.
    """
    if kind not in FORMATS:
        msg = f"--format {kind}: no such format of traces; formats are {', '.join(FORMATS)}"
        raise ConfigError(msg)
    if path.exists():
        msg = f"{path} exists; remove it, or choose another name"
        raise ConfigError(msg)
    if not path.resolve().parent.is_dir():
        msg = f"{path}: its folder does not exist; create it"
        raise ConfigError(msg)
    if kind == PARQUET:
        import_extra("pyarrow.parquet", "parquet", "--format parquet")


def write_traces(path: Path, kind: str, traces: Iterable[Trace]) -> int:
    """Write traces, and return their number. A process that is killed leaves nothing with the name `path`.

    Args:
        path: file of Parquet or, by its ending, of JSON Lines; for JSON with another ending a folder.
        kind: name of the format.
        traces: in the order in which they are read again; those of a row one after another.

    Raises:
        ConfigError: see `check_output`.
        TraceError: a trace cannot be written exactly.
    """
    check_output(path, kind)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write: Callable[[Path, str, Iterator[Trace]], int]
    write = _parquet if kind == PARQUET else _lines if path.suffix in LINES else _documents
    try:
        count = write(temporary, kind, iter(traces))
        temporary.rename(path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)
    return count


def _lines(path: Path, kind: str, traces: Iterator[Trace]) -> int:
    count = 0
    with _private(path) as file:
        for trace in traces:
            file.write(dumps(FORMATS[kind].record_of(trace), trace.name).encode() + b"\n")
            count += 1
        file.flush()
        os.fsync(file.fileno())
    return count


def _documents(path: Path, kind: str, traces: Iterator[Trace]) -> int:
    """Write a folder with a document a trace, whose names are in the order of the traces."""
    path.mkdir(mode=0o700)
    count = 0
    for trace in traces:
        name = "-".join(filter(None, (f"{count:08d}", trace.row, str(trace.sample))))
        with _private(path / f"{name}.json") as file:
            file.write(dumps(FORMATS[kind].record_of(trace), trace.name).encode() + b"\n")
        count += 1
    return count


def _parquet(path: Path, kind: str, traces: Iterator[Trace]) -> int:
    pyarrow = import_extra("pyarrow", "parquet", "--format parquet")
    parquet = import_extra("pyarrow.parquet", "parquet", "--format parquet")
    record_of, columns, count = FORMATS[kind].record_of, schema(), 0
    with _private(path) as file:
        with parquet.ParquetWriter(file, columns, compression="zstd") as writer:
            while batch := [record_of(trace) for trace in islice(traces, GROUP_ROWS)]:
                writer.write_table(pyarrow.Table.from_pylist(batch, columns))
                count += len(batch)
        file.flush()
        os.fsync(file.fileno())
    return count


def _private(path: Path) -> Any:
    """Create a file that only its user may read: traces hold the data of a run."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
