"""Data source of Arrow files, and of folders that `save_to_disk` of Hugging Face's `datasets` has written.

Files are mapped into memory, so that a row costs the pages that hold it, whatever the size of the file.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from relax_actors.data.field_names import listed
from relax_actors.data.files import FileRows, data_files
from relax_actors.data.source import SourceSettings
from relax_actors.errors import ConfigError, RowError
from relax_actors.registry.dotted import import_extra

ENDINGS = (".arrow", ".feather")
MAX_DECODED_BYTES = 256 << 20
"""Bytes that compressed files may take in memory, as they cannot be mapped."""


def open_arrow(settings: SourceSettings) -> ArrowFiles:
    """Open `data.path`: a file, a folder of files, or a folder of `save_to_disk`.

    Raises:
        ConfigError: pyarrow is not installed, no such file, it is not Arrow, it is compressed, or it has no rows.
    """
    return ArrowFiles(settings)


class ArrowFiles(FileRows):
    """Tasks of Arrow files, in the file or the stream format."""

    def __init__(self, settings: SourceSettings) -> None:
        self._pyarrow = import_extra("pyarrow", "parquet", "data.kind = 'arrow'")
        self._ipc = import_extra("pyarrow.ipc", "parquet", "data.kind = 'arrow'")
        paths = _saved_files(settings) or data_files(settings, "arrow", ENDINGS)
        super().__init__(paths, settings)
        self._batches: list[list[Any]] = []
        before = self._pyarrow.total_allocated_bytes()
        for path in paths:
            batches = []
            for batch in self._read_batches(path):
                if self._pyarrow.total_allocated_bytes() - before > MAX_DECODED_BYTES:
                    msg = (
                        f"data.path = {str(path)!r} is compressed, and takes more than {MAX_DECODED_BYTES >> 20} MiB "
                        "in memory; write it uncompressed, or as Parquet"
                    )
                    raise ConfigError(msg)
                if batch.num_rows:
                    batches.append(batch)
            self._batches.append(batches)
        self._starts = [[*accumulate((batch.num_rows for batch in own), initial=0)] for own in self._batches]
        self.set_counts([starts[-1] for starts in self._starts], settings.size, f"data.path = {str(settings.path)!r}")

    def place(self, file: int, number: int) -> str:
        """Return file and row."""
        return f"{self.paths[file]} row {number + 1}"

    def read(self, file: int, number: int) -> object:
        """Return a row, decoded."""
        starts, where = self._starts[file], self.place(file, number)
        batch = bisect_right(starts, number) - 1
        row = self._batches[file][batch].slice(number - starts[batch], 1)
        if row.nbytes > self.max_bytes:
            msg = (
                f"{where}: {row.nbytes} bytes, more than the {self.max_bytes >> 20} MiB that a row may have; remove "
                "columns that the reward does not need"
            )
            raise RowError(msg)
        try:
            return row.to_pylist()[0]
        except (self._pyarrow.ArrowException, UnicodeDecodeError, ValueError) as error:
            msg = f"{where}: cannot be decoded ({error}); write the file again"
            raise RowError(msg) from error

    def _read_batches(self, path: Path) -> Iterator[Any]:
        number = 0
        try:
            mapped = self._pyarrow.memory_map(str(path))
            if mapped.read(6) == b"ARROW1":
                reader = self._ipc.open_file(mapped)
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)
                return
            mapped.seek(0)
            for number, batch in enumerate(self._ipc.open_stream(mapped)):  # noqa: B007 the number is for errors
                yield batch
        except (self._pyarrow.ArrowException, OSError) as error:
            text = " ".join(str(error).split())
            msg = (
                f"data.path = {str(path)!r} cannot be read as Arrow ({text}, in or behind record batch {number}); give "
                "an Arrow file, or write it again"
            )
            raise ConfigError(msg) from error


def _saved_files(settings: SourceSettings) -> Sequence[Path]:
    """Return the files of a folder of `save_to_disk`, in their order; none if it is no such folder.

    Raises:
        ConfigError: it has several splits and `data.split` names none of them, or a file is missing.
    """
    folder = Path(settings.required("path", "arrow"))
    where = f"data.path = {str(folder)!r}"
    splits = _json_of(folder / "dataset_dict.json").get("splits")
    if isinstance(splits, list):
        if settings.split is None and len(splits) == 1:
            settings = replace(settings, split=splits[0])
        if settings.split not in splits:
            is_set = "is not set" if settings.split is None else f"= {settings.split!r}"
            msg = f"data.split {is_set}, but {where} has the splits {listed(splits)}; choose one of them"
            raise ConfigError(msg)
        folder = folder / str(settings.split)
    entries = _json_of(folder / "state.json").get("_data_files")
    if not isinstance(entries, list):
        return ()
    paths = [folder / Path(str(entry.get("filename", ""))).name for entry in entries if isinstance(entry, dict)]
    if missing := [path.name for path in paths if not path.is_file()]:
        msg = f"{where} lacks {missing[0]}, which its state.json names; save the data set again"
        raise ConfigError(msg)
    return paths


def _json_of(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
