"""Data source of JSON Lines files: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relax_actors.data.files import FileRows, data_files
from relax_actors.data.source import SourceSettings
from relax_actors.errors import ConfigError, RowError

ENDINGS = (".jsonl", ".ndjson")
_CHUNK_BYTES = 1 << 20
_NEWLINE = 10
_SPACES = np.isin(np.arange(256), list(b" \t\n\r\v\f"))


def open_jsonl(settings: SourceSettings) -> JsonLines:
    """Open `data.path` as JSON Lines; raises ConfigError if missing or empty."""
    return JsonLines(data_files(settings, "jsonl", ENDINGS), settings)


class JsonLines(FileRows):
    """Tasks of JSON Lines files; blank lines are ignored.

    The start of each line is indexed once (8 bytes a row, about a gigabyte a second); a line is read when its task is
    used. No more than `max_bytes` of a line are ever in memory; a longer line is a malformed row.
    """

    def __init__(self, paths: Sequence[Path], settings: SourceSettings) -> None:
        super().__init__(paths, settings)
        self._indices: list[LineIndex] = []
        left = settings.size
        for path in paths:
            index = LineIndex(path, left)
            self._indices.append(index)
            left = None if left is None else left - len(index.starts)
            if left is not None and left <= 0:
                break
        where = f"data.path = {str(settings.path)!r}"
        if not any(len(index.starts) for index in self._indices):
            msg = f"{where} holds nothing but blank lines; give a file with at least one row"
            raise ConfigError(msg)
        self.set_counts([len(index.starts) for index in self._indices], settings.size, where)

    def place(self, file: int, number: int) -> str:
        """Return file and line of a row."""
        return f"{self.paths[file]} line {self._indices[file].line(number)}"

    def text(self, file: int, number: int) -> bytes:
        """Return the line of a row; raises RowError if it is too long."""
        with self.paths[file].open("rb") as lines:
            lines.seek(int(self._indices[file].starts[number]))
            line = lines.readline(self.max_bytes + 1)
        if len(line) > self.max_bytes:
            msg = (
                f"{self.place(file, number)}: longer than {self.max_bytes >> 20} MiB, the most that a row may have; "
                "write one JSON object a line, without fields that the reward does not need"
            )
            raise RowError(msg)
        return line

    def read(self, file: int, number: int) -> object:
        """Return a row, decoded."""
        return _parsed(self.text(file, number), self.place(file, number))


class LineIndex:
    """Where the lines of a file begin: all, or the first `most`.

    `starts` `[lines] int64` are the first bytes of the lines that are not blank.
    """

    def __init__(self, path: Path, most: int | None) -> None:
        starts, doubtful, count = [], [], 0
        base, begins = 0, True
        with path.open("rb", buffering=0) as file:
            while (most is None or count < most) and (chunk := file.read(_CHUNK_BYTES)):
                data = np.frombuffer(chunk, np.uint8)
                own = np.flatnonzero(data == _NEWLINE) + 1
                own = np.concatenate([[0], own]) if begins else own
                begins = chunk[-1] == _NEWLINE
                own = own[own < len(data)]
                spaces = _SPACES[data[own]]
                starts.append(own + base)
                doubtful.append(own[spaces] + base)
                count += len(own) - int(spaces.sum())
                base += len(data)
            self._blank = _blank(file.fileno(), np.concatenate([*doubtful, np.zeros(0, np.int64)]))
        starts_of_lines = np.concatenate([*starts, np.zeros(0, np.int64)])
        is_row = ~np.isin(starts_of_lines, self._blank) if len(self._blank) else slice(None)
        self.starts: NDArray[np.int64] = starts_of_lines[is_row]
        self.starts = self.starts[:most]

    def line(self, number: int) -> int:
        """Return the number of a row's line, counted from 1, blank lines included."""
        return number + 1 + int(np.searchsorted(self._blank, self.starts[number]))


def _blank(file: int, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return which lines that begin with white space have nothing else."""
    blank = []
    with open(file, "rb", closefd=False) as lines:
        for start in starts.tolist():
            lines.seek(start)
            while (part := lines.readline(_CHUNK_BYTES)).isspace() and not part.endswith(b"\n"):
                pass
            if not part or part.isspace():
                blank.append(start)
    return np.array(blank, np.int64)


def _parsed(line: bytes, where: str) -> object:
    try:
        # Without the end of the line: an error behind it would be in column 1 of the next line.
        return json.loads(line.decode("utf-8-sig").rstrip("\r\n\t "))
    except UnicodeDecodeError as error:
        msg = f"{where}: no UTF-8 ({error.reason} at byte {error.start + 1}); save the file as UTF-8"
    except json.JSONDecodeError as error:
        msg = f"{where}: no JSON ({error.msg} at column {error.colno}); write one JSON object a line"
    except RecursionError:
        msg = f"{where}: nested too deeply; flatten the row"
    except ValueError as error:
        msg = f"{where}: no JSON that Python reads ({error}); write the number as text"
    raise RowError(msg)
