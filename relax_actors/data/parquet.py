"""Data source of Parquet files, read with pyarrow."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from relax_actors.data.fields import check_file, check_index, listed, task_of
from relax_actors.data.source import SourceSettings
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError, RowError
from relax_actors.registry.dotted import import_extra

_GROUPS_HELD = 4


def open_parquet(settings: SourceSettings) -> Parquet:
    """Open `data.path` as Parquet.

    Raises:
        ConfigError: pyarrow is not installed, no such file, or it has no rows or not the prompt column.
    """
    path = Path(settings.required("path", "parquet"))
    return Parquet(path, settings.size, settings.prompt_field, settings.answer_field)


class Parquet:
    """Tasks of a Parquet file; row groups are read on demand, and the last four are kept."""

    def __init__(self, path: Path, size: int | None, prompt_field: str, answer_field: str) -> None:
        self._pyarrow = import_extra("pyarrow", "parquet", "data.kind = 'parquet'")
        self._parquet = import_extra("pyarrow.parquet", "parquet", "data.kind = 'parquet'")
        check_file(path)
        self._path = path
        self._prompt_field, self._answer_field = prompt_field, answer_field
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
            row = self._group(group).slice(i - start, 1).to_pylist()[0]
        except (self._pyarrow.ArrowException, UnicodeDecodeError) as error:
            msg = f"{where}: row group {group} cannot be read ({error}); write the file again"
            raise RowError(msg) from error
        return task_of(row, where, self._prompt_field, self._answer_field)

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
        with self._parquet.ParquetFile(self._path) as file:
            return file.read_row_group(group)
