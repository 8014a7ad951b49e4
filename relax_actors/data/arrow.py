"""Data source of Arrow files, and of folders of `save_to_disk` of `datasets`.

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

from relax_actors.data.arrow_rows import ArrowRows
from relax_actors.data.field_names import listed
from relax_actors.data.files import data_files
from relax_actors.data.source import SourceSettings
from relax_actors.errors import ConfigError
from relax_actors.registry.dotted import import_extra

ENDINGS = (".arrow", ".feather")
MAX_DECODED_BYTES = 256 << 20
"""Bytes that compressed files may take in memory, as they cannot be mapped."""


class ArrowFiles(ArrowRows):
    """Tasks of Arrow files at `data.path`, in any Arrow format or a saved folder.

    Raises:
        ConfigError: pyarrow is not installed, no such file, it is not Arrow, it is compressed, or it has no rows.
    """

    def __init__(self, settings: SourceSettings) -> None:
        pyarrow = import_extra("pyarrow", "parquet", "data.kind = 'arrow'")
        self._ipc = import_extra("pyarrow.ipc", "parquet", "data.kind = 'arrow'")
        paths = _saved_files(settings) or data_files(settings, "arrow", ENDINGS)
        super().__init__(paths, settings, pyarrow)
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

    def read(self, file: int, number: int) -> object:
        """Return a row, decoded."""
        starts = self._starts[file]
        batch = bisect_right(starts, number) - 1
        return self.decoded(self._batches[file][batch], number - starts[batch], self.place(file, number))

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
    """Return the files of a folder of `save_to_disk`, in order; none for others.

    Raises:
        ConfigError: `data.split` names none of its splits, or is not set and it has several; or a file is missing.
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
    state = _json_of(folder / "state.json")
    entries = state.get("_data_files")
    if not isinstance(entries, list):
        return ()
    if not isinstance(splits, list) and settings.split not in (None, state.get("_split")):
        msg = f"data.split = {settings.split!r}, but {where} is a single data set; remove data.split"
        raise ConfigError(msg)
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
