"""Rows of files that pyarrow reads: places, and a row as plain Python values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_actors.data.files import FileRows
from relax_actors.data.source import SourceSettings
from relax_actors.errors import RowError


class ArrowRows(FileRows):
    """Tasks of the rows of files in a format that pyarrow reads."""

    def __init__(self, paths: Sequence[Path], settings: SourceSettings, pyarrow: Any) -> None:
        super().__init__(paths, settings)
        self._pyarrow = pyarrow

    def place(self, file: int, number: int) -> str:
        """Return file and row."""
        return f"{self.paths[file]} row {number + 1}"

    def decoded(self, table: Any, number: int, where: str) -> object:
        """Return row `number` of a table or a batch.

        Raises:
            RowError: it is too large, or has a value that Python has no equal of, such as a date in the year 100000.
        """
        row = table.slice(number, 1)
        if row.nbytes > self.max_bytes:
            msg = (
                f"{where}: {row.nbytes} bytes, more than the {self.max_bytes >> 20} MiB that a row may have; remove "
                "columns that the reward does not need"
            )
            raise RowError(msg)
        try:
            return row.to_pylist()[0]
        # Text that is no UTF-8, dates out of range, and unknown time zones.
        except (self._pyarrow.ArrowException, ValueError, OverflowError, LookupError) as error:
            msg = f"{where}: cannot be decoded ({error}); write the file again"
            raise RowError(msg) from error
