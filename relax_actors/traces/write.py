"""Write traces to JSON Lines, Parquet, or a folder of JSON documents; atomic."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from relax_actors.errors import ConfigError
from relax_actors.registry.dotted import import_extra
from relax_actors.traces.exact_json import dumps
from relax_actors.traces.formats import FORMATS, PARQUET
from relax_actors.traces.model import Trace, TraceError
from relax_actors.traces.parquet import schema

GROUP_ROWS = 256
"""Traces of a row group of Parquet, which are in memory at once."""
LINES, TABLE = (".jsonl", ".ndjson"), ".parquet"


@dataclass(frozen=True, slots=True)
class Record:
    """A trace as its format writes it.

    Attributes:
        name: row and sample, for the name of a document.
        content: a line of JSON, or a row of Parquet.
    """

    name: str
    content: bytes | dict[str, Any]


def record_of(trace: Trace, kind: str) -> Record:
    """Return the record of a trace; raises TraceError if it cannot be written exactly."""
    made = FORMATS[kind].record_of(trace)
    name = "-".join(filter(None, (trace.row, str(trace.sample))))
    if kind == PARQUET:
        return Record(name, made)
    try:
        return Record(name, dumps(made, trace.name).encode() + b"\n")
    except UnicodeEncodeError as error:
        msg = f"{trace.name}: it has text that UTF-8 cannot hold ({error}); correct the text"
        raise TraceError(msg) from error


def check_output(path: Path, kind: str) -> None:
    """Check that traces can be written to a path.

    Raises:
        ConfigError: the format is unknown or has another ending, the path exists, its folder does not, or pyarrow is
            not installed.
    """
    if kind not in FORMATS:
        msg = f"--format {kind}: no such format of traces; formats are {', '.join(FORMATS)}"
        raise ConfigError(msg)
    if kind == PARQUET and path.suffix != TABLE:
        others = " or ".join(name for name in FORMATS if name != PARQUET)
        msg = f"{path}: --format {kind} writes a file *{TABLE}; change its name, or give --format {others}"
        raise ConfigError(msg)
    if kind != PARQUET and path.suffix in (TABLE, ".json"):
        msg = (
            f"{path}: --format {kind} writes a file *.jsonl, or a folder of documents with another ending; change its "
            "name, or leave out --format for a file *.parquet"
        )
        raise ConfigError(msg)
    if path.exists():
        msg = f"{path} exists; remove it, or choose another name"
        raise ConfigError(msg)
    if not path.resolve().parent.is_dir():
        msg = f"{path}: its folder does not exist; create it"
        raise ConfigError(msg)
    if kind == PARQUET:
        import_extra("pyarrow.parquet", "parquet", "--format parquet")


def write_records(path: Path, kind: str, records: Iterable[Record]) -> int:
    """Write records atomically, and return their number.

    The path is a file of Parquet or, by its ending, of JSON Lines; for JSON with another ending a folder. Records are
    in the order in which they are read again; those of a row one after another.

    Raises:
        ConfigError: see `check_output`.
    """
    check_output(path, kind)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write: Callable[[Path, Iterator[Record]], int]
    write = _parquet if kind == PARQUET else _lines if path.suffix in LINES else _documents
    try:
        count = write(temporary, iter(records))
        temporary.rename(path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)
    return count


def _lines(path: Path, records: Iterator[Record]) -> int:
    count = 0
    with _private(path) as file:
        for record in records:
            file.write(record.content)
            count += 1
        file.flush()
        os.fsync(file.fileno())
    return count


def _documents(path: Path, records: Iterator[Record]) -> int:
    """Write a folder with a document a trace, whose names are in the order of the traces."""
    path.mkdir(mode=0o700)
    count = 0
    for record in records:
        with _private(path / f"{count:08d}-{record.name}.json") as file:
            file.write(record.content)
        count += 1
    return count


def _parquet(path: Path, records: Iterator[Record]) -> int:
    pyarrow = import_extra("pyarrow", "parquet", "--format parquet")
    parquet = import_extra("pyarrow.parquet", "parquet", "--format parquet")
    columns, count = schema(), 0
    with _private(path) as file:
        with parquet.ParquetWriter(file, columns, compression="zstd") as writer:
            while batch := [record.content for record in islice(records, GROUP_ROWS)]:
                writer.write_table(pyarrow.Table.from_pylist(batch, columns))
                count += len(batch)
        file.flush()
        os.fsync(file.fileno())
    return count


def _private(path: Path) -> Any:
    """Create a file that only its user may read: traces hold the data of a run."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
