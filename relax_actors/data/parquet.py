"""Data source of Parquet files, read with pyarrow.

Some kilobytes of Parquet can hold terabytes: a dictionary has one long value, and all rows refer to it. So a row group
is decoded in small batches, up to a limit.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from relax_actors.data.fields import RowFields, check_file, check_index, listed, task_of
from relax_actors.data.source import SourceSettings
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError, RowError
from relax_actors.registry.dotted import import_extra

_GROUPS_HELD = 4
MAX_GROUP_ROWS, MAX_GROUP_BYTES = 10_000_000, 2 << 30
"""Rows of a row group, and bytes of their columns in memory."""
BATCH_ROWS, BATCH_BYTES = 256, 256 << 20
_HEADER_BYTES = 32
"""Bytes at the start of a page that hold its type and its size."""


def open_parquet(settings: SourceSettings) -> Parquet:
    """Open `data.path` as Parquet.

    Raises:
        ConfigError: pyarrow is not installed, no such file, or it has no rows or not the prompt column.
    """
    path = Path(settings.required("path", "parquet"))
    fields = RowFields(settings.prompt_field, settings.answer_field, path.parent, settings.media_bytes)
    return Parquet(path, settings.size, fields)


class Parquet:
    """Tasks of a Parquet file; row groups are read on demand, and the last four are kept."""

    def __init__(self, path: Path, size: int | None, fields: RowFields) -> None:
        self._pyarrow = import_extra("pyarrow", "parquet", "data.kind = 'parquet'")
        self._parquet = import_extra("pyarrow.parquet", "parquet", "data.kind = 'parquet'")
        check_file(path)
        self._path = path
        self._fields, prompt_field = fields, fields.prompt
        counts, columns = self._footer()
        if prompt_field not in columns:
            msg = (
                f"data.path = {str(path)!r} has no column {prompt_field!r}; columns found: {listed(columns)}; "
                f"set data.prompt_field"
            )
            raise ConfigError(msg)
        self._ends = list(accumulate(counts))
        total = self._ends[-1] if counts else 0
        if total == 0:
            msg = f"data.path = {str(path)!r} has no rows; give a file with at least one row"
            raise ConfigError(msg)
        self._size = total if size is None else min(size, total)
        self._group = lru_cache(maxsize=_GROUPS_HELD)(self._read_group)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> Task:
        check_index(i, self._size)
        where = f"{self._path} row {i + 1}"
        group = bisect_right(self._ends, i)
        start = self._ends[group - 1] if group else 0
        try:
            held = self._group(group)
            if isinstance(held, RowError):
                raise held
            row = held.slice(i - start, 1)
            if row.nbytes > (most := self._fields.max_bytes):
                msg = (
                    f"{where}: {row.nbytes} bytes, more than the {most >> 20} MiB that a row may have; remove "
                    "columns that the reward does not need"
                )
                raise RowError(msg)
            fields = row.to_pylist()[0]
        except (self._pyarrow.ArrowException, UnicodeDecodeError) as error:
            msg = f"{where}: row group {group} cannot be read ({error}); write the file again"
            raise RowError(msg) from error
        return task_of(fields, where, self._fields)

    def _footer(self) -> tuple[list[int], list[str]]:
        """Number of rows of each row group, and names of the columns."""
        try:
            with self._parquet.ParquetFile(self._path) as file:
                groups = range(file.metadata.num_row_groups)
                return [file.metadata.row_group(group).num_rows for group in groups], file.schema_arrow.names
        except (self._pyarrow.ArrowException, OSError) as error:
            msg = f"data.path = {str(self._path)!r} cannot be read as Parquet ({error}); give a Parquet file"
            raise ConfigError(msg) from error

    def _read_group(self, group: int) -> Any:
        """Read a row group; an error if it is larger than the limits, so that it is not decoded for every row."""
        batches, size = [], 0
        with self._parquet.ParquetFile(self._path) as file:
            facts = file.metadata.row_group(group)
            rows = self._batch_rows([facts.column(column) for column in range(facts.num_columns)])
            if facts.num_rows > MAX_GROUP_ROWS or facts.total_byte_size > MAX_GROUP_BYTES:
                return self._too_large(group)
            for batch in file.iter_batches(batch_size=rows, row_groups=[group]):
                batches.append(batch)
                size += batch.nbytes
                if size > MAX_GROUP_BYTES:
                    return self._too_large(group)
            return self._pyarrow.Table.from_batches(batches)

    def _too_large(self, group: int) -> RowError:
        return RowError(
            f"{self._path}: row group {group} has more than {MAX_GROUP_ROWS} rows or {MAX_GROUP_BYTES >> 30} GiB in "
            "memory; write the file again with smaller row groups (row_group_size of pyarrow.parquet.write_table)"
        )

    def _batch_rows(self, columns: list[Any]) -> int:
        """Return how many rows are decoded at once, such that the longest values that all may have fit in memory."""
        largest = 1
        with self._path.open("rb") as file:
            for column in columns:
                if column.dictionary_page_offset is not None:
                    file.seek(column.dictionary_page_offset)
                    largest += _page_bytes(file.read(_HEADER_BYTES))
        return max(1, min(BATCH_ROWS, BATCH_BYTES // largest))


def _page_bytes(header: bytes) -> int:
    """Return the decoded size of a page: the second field of its header in Thrift's compact protocol."""
    fields: list[int] = []
    at = 0
    while len(fields) < 2 and at < len(header):  # noqa: PLR2004 the type of the page, and its size
        at, value, shift = at + 1, 0, 0  # skip the name of the field
        while at < len(header):
            value |= (header[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if header[at - 1] < 0x80:  # noqa: PLR2004 the last byte of a number
                break
        fields.append(value >> 1)  # numbers are zigzag-encoded, and sizes not negative
    return fields[-1] if fields else 0
