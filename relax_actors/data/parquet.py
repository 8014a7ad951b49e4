"""Data source of Parquet files, read with pyarrow.

Some kilobytes of Parquet can hold terabytes: a dictionary has one long value, and all rows refer to it. So a row group
is decoded in small batches, up to a limit.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from relax_actors.data.arrow_rows import ArrowRows
from relax_actors.data.files import data_files
from relax_actors.data.source import Blocks, SourceSettings
from relax_actors.errors import ConfigError, RowError
from relax_actors.registry.dotted import import_extra

ENDINGS = (".parquet",)
MAX_GROUP_ROWS, MAX_GROUP_BYTES = 10_000_000, 2 << 30
"""Rows of a row group, and bytes of their columns in memory."""
BATCH_ROWS, BATCH_BYTES = 256, 256 << 20
_HEADER_BYTES = 32
"""Bytes at the start of a page that hold its type and its size."""
HELD_BYTES = 64 << 20
"""Bytes of the parts that rows are shuffled within."""
MOST_BYTES = 4 * HELD_BYTES
"""Bytes of the parts that are kept, as parts differ in size; a larger one is kept alone."""
Key = TypeVar("Key", bound=Hashable)


class Parquet(ArrowRows):
    """Tasks of Parquet files; row groups are read on demand, and recent ones are kept.

    Raises:
        ConfigError: pyarrow is not installed, no such file, or it has no rows or not the prompt column.
    """

    def __init__(self, settings: SourceSettings) -> None:
        pyarrow = import_extra("pyarrow", "parquet", "data.kind = 'parquet'")
        self._parquet = import_extra("pyarrow.parquet", "parquet", "data.kind = 'parquet'")
        paths = data_files(settings, "parquet", ENDINGS)
        super().__init__(paths, settings, pyarrow)
        # Number of the first row of each row group in its file, and the number of the file's rows at the end.
        self._starts: list[list[int]] = []
        for path in paths:
            counts, columns = self._footer(path)
            if not self.names.has_prompt(columns):
                msg = f"data.path = {str(path)!r} has {self.names.without_prompt(columns, 'column')}"
                raise ConfigError(msg)
            self._starts.append([*accumulate(counts, initial=0)])
        self._groups: HeldGroups[tuple[int, int]] = HeldGroups(self._read_group)
        where = f"data.path = {str(settings.path)!r}"
        self.set_counts([starts[-1] for starts in self._starts], settings.size, where)

    @cached_property
    def blocks(self) -> Blocks:
        """Row groups, and how many of them fit into `HELD_BYTES`, by the first row's."""
        ends = np.cumsum(np.concatenate([np.diff(starts) for starts in self._starts])).clip(0, len(self))
        sizes = np.diff(ends, prepend=0)
        sizes = sizes[sizes > 0]
        file, number = self.locate(0)
        first = self._groups.get((file, self._group_of(file, number)))
        size = 0 if isinstance(first, RowError) else first.nbytes / first.num_rows * sizes.mean()
        held = 1 << max(0, int(HELD_BYTES // size).bit_length() - 1) if size else 1
        return Blocks(sizes, held)

    def read(self, file: int, number: int) -> object:
        """Return a row, decoded."""
        return self.part(file, number, None)

    def part(self, file: int, number: int, names: Sequence[str] | None) -> object:
        """Return columns of a row, decoded; all if None, and none of those that the file lacks."""
        starts, where = self._starts[file], self.place(file, number)
        group = self._group_of(file, number)
        held = self._groups.get((file, group))
        if isinstance(held, RowError):
            msg = f"{where}: {held}"
            raise RowError(msg) from held
        if names is not None:
            held = held.select([name for name in held.column_names if name in names])
        return self.decoded(held, number - starts[group], where)

    def _group_of(self, file: int, number: int) -> int:
        """Return a row's row group, the last that begins at or before it."""
        return bisect_right(self._starts[file], number) - 1

    def _footer(self, path: Path) -> tuple[list[int], list[str]]:
        """Number of rows of each row group, which may be 0, and names of the columns."""
        try:
            with self._parquet.ParquetFile(path) as file:
                groups = range(file.metadata.num_row_groups)
                return [file.metadata.row_group(group).num_rows for group in groups], file.schema_arrow.names
        except (self._pyarrow.ArrowException, OSError) as error:
            msg = f"data.path = {str(path)!r} cannot be read as Parquet ({error}); give a Parquet file"
            raise ConfigError(msg) from error

    def _read_group(self, key: tuple[int, int]) -> Any:
        """Read a row group.

        Returns:
            A table, or why there is none: it is corrupt, or larger than the limits. It is then not decoded again.
        """
        number, group = key
        path = self.paths[number]
        try:
            return self._decoded(path, group)
        except (self._pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the file system, not of the content
            groups = len(self._starts[number]) - 1
            text = " ".join(str(error).split())
            return RowError(f"row group {group} of {groups} cannot be read ({text}); write the file again")

    def _decoded(self, path: Path, group: int) -> Any:
        batches, size = [], 0
        with self._parquet.ParquetFile(path) as file:
            facts = file.metadata.row_group(group)
            rows = self._batch_rows(path, [facts.column(column) for column in range(facts.num_columns)])
            if facts.num_rows > MAX_GROUP_ROWS or facts.total_byte_size > MAX_GROUP_BYTES:
                return _too_large(group)
            for batch in file.iter_batches(batch_size=rows, row_groups=[group]):
                batches.append(batch)
                size += batch.nbytes
                if size > MAX_GROUP_BYTES:
                    return _too_large(group)
            return self._pyarrow.Table.from_batches(batches)

    def _batch_rows(self, path: Path, columns: Sequence[Any]) -> int:
        """Return how many rows may be decoded at once, if all had the longest values."""
        largest = 1
        with path.open("rb") as file:
            for column in columns:
                if column.dictionary_page_offset is not None:
                    file.seek(column.dictionary_page_offset)
                    largest += _page_bytes(file.read(_HEADER_BYTES))
        return max(1, min(BATCH_ROWS, BATCH_BYTES // largest))


def _too_large(group: int) -> RowError:
    return RowError(
        f"row group {group} has more than {MAX_GROUP_ROWS} rows or {MAX_GROUP_BYTES >> 30} GiB in memory; write the "
        "file again with smaller row groups (row_group_size of pyarrow.parquet.write_table)"
    )


def _page_bytes(header: bytes) -> int:
    """Return a page's decoded size: the second field of its Thrift header."""
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


class HeldGroups(Generic[Key]):
    """Parts by key, such as the row groups of a Parquet file; read by several threads.

    `read` decodes a part: an object with `nbytes`, or an exception that says why there is none.
    """

    def __init__(self, read: Callable[[Key], Any]) -> None:
        self._read = read
        self._held: OrderedDict[Key, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Any:
        """Return a part; others that were not used for longest are forgotten for it."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
            part = self._held[key] = self._read(key)
            sizes = {name: getattr(held, "nbytes", 0) for name, held in self._held.items()}
            total = sum(sizes.values())
            for name in [*self._held][:-1]:
                if total <= MOST_BYTES:
                    break
                total -= sizes[name]
                del self._held[name]
            return part
