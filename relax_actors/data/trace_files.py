"""Records of files of traces: lines of JSON, documents of JSON, and rows of Parquet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic_core import from_json

from relax_actors.data.files import FileRows, data_files
from relax_actors.data.jsonl import ENDINGS as LINES
from relax_actors.data.jsonl import JsonLines
from relax_actors.data.parquet import ENDINGS as TABLES
from relax_actors.data.parquet import Parquet
from relax_actors.data.source import SourceSettings
from relax_actors.errors import ConfigError, RowError
from relax_actors.traces import Trace
from relax_actors.traces.formats import FORMATS, PARQUET, format_of, trace_of
from relax_actors.traces.head import Head
from relax_actors.traces.parquet import HEAD

DOCUMENTS = (".json",)
MAX_BYTES = 1 << 30
"""Bytes of one trace in its file."""


class Documents(FileRows):
    """JSON documents with one trace each."""

    def __init__(self, paths: Sequence[Path], settings: SourceSettings) -> None:
        super().__init__(paths, settings)
        self.set_counts([1] * len(paths), None, f"data.path = {str(settings.path)!r}")

    def place(self, file: int, number: int) -> str:
        """Return the file."""
        del number
        return str(self.paths[file])

    def text(self, file: int, number: int) -> bytes:
        """Return the document; raises RowError if it is too long."""
        del number
        path = self.paths[file]
        if path.stat().st_size > MAX_BYTES:
            msg = f"{path}: longer than {MAX_BYTES >> 20} MiB, the most that a trace may have"
            raise RowError(msg)
        return path.read_bytes()

    def read(self, file: int, number: int) -> object:
        """Return the document, parsed."""
        try:
            return json.loads(self.text(file, number))
        except (ValueError, RecursionError) as error:
            msg = f"{self.paths[file]}: no JSON ({error}); write one trace a document, or one a line in a file *.jsonl"
            raise RowError(msg) from error


class TraceFiles:
    """Traces of the files of `data.path`, one file after another.

    Raises:
        ConfigError: no such file, files of several kinds, or a file that cannot be read.
    """

    def __init__(self, settings: SourceSettings) -> None:
        paths = data_files(settings, "traces", (*LINES, *DOCUMENTS, *TABLES))
        self._rows = _open(paths, SourceSettings(path=settings.path))
        self._rows.max_bytes = MAX_BYTES

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, number: int) -> str:
        """Return the place of a trace, for errors."""
        return self._rows.place(*self._rows.locate(number))

    def record(self, number: int) -> object:
        """Return the record of a trace, in its format; raises RowError if undecodable."""
        return self._rows.read(*self._rows.locate(number))

    def head(self, number: int) -> Head | None:
        """Return the head of a trace; None if it cannot be decoded, or does not tell its row."""
        try:
            if isinstance(self._rows, Parquet):
                record = self._rows.part(*self._rows.locate(number), HEAD)
                head_of_row = FORMATS[PARQUET].head(record) if isinstance(record, dict) else None
            else:
                record = self._quick_record(number)
                head_of_row = FORMATS[format_of(record, "")].head(record) if isinstance(record, dict) else None
        except RowError:
            return None
        return head_of_row if head_of_row is not None and head_of_row.row else None

    def _quick_record(self, number: int) -> object:
        """Return a record of JSON, parsed by pydantic's parser, which takes a third of the time; errors as `record`."""
        assert isinstance(self._rows, JsonLines | Documents)  # noqa: S101 Parquet has columns
        try:
            return from_json(self._rows.text(*self._rows.locate(number)))
        except ValueError:
            return self.record(number)

    def trace(self, number: int) -> Trace:
        """Return a trace; raises RowError if it cannot be decoded, or is not exact."""
        return trace_of(self.record(number), self.place(number))


def _open(paths: Sequence[Path], settings: SourceSettings) -> FileRows:
    endings = {path.suffix for path in paths}
    if endings <= {*LINES}:
        return JsonLines(paths, settings)
    if endings <= {*DOCUMENTS}:
        return Documents(paths, settings)
    if endings <= {*TABLES}:
        return Parquet(settings)
    known = ", ".join(f"*{ending}" for ending in (*LINES, *DOCUMENTS, *TABLES))
    msg = (
        f"data.path = {str(settings.path)!r} has files {', '.join(sorted(endings))}; traces are files of one of the "
        f"endings {known}"
    )
    raise ConfigError(msg)
