"""Data source of JSON Lines files: one JSON object a line."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

from relax_actors.data.fields import RowFields, check_file, check_index, task_of
from relax_actors.data.source import SourceSettings
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError, RowError

_BUFFER_BYTES = 1 << 20


def open_jsonl(settings: SourceSettings) -> JsonLines:
    """Open `data.path` as JSON Lines.

    Raises:
        ConfigError: no such file, or it has no rows.
    """
    path = Path(settings.required("path", "jsonl"))
    fields = RowFields(settings.prompt_field, settings.answer_field, path.parent, settings.media_bytes)
    return JsonLines(path, settings.size, fields)


class JsonLines:
    """Tasks of a JSON Lines file; blank lines are ignored.

    The start of each line is indexed once (16 bytes a row); a line is read when its task is used. No more than
    `RowFields.max_bytes` of a line are ever in memory; a longer line is a malformed row.
    """

    def __init__(self, path: Path, size: int | None, fields: RowFields) -> None:
        check_file(path)
        self._path = path
        self._fields, self._max_bytes = fields, fields.max_bytes
        self._offsets, self._numbers = _index(path, size, self._max_bytes)
        if not self._offsets:
            msg = f"data.path = {str(path)!r} holds nothing but blank lines; give a file with at least one row"
            raise ConfigError(msg)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, i: int) -> Task:
        check_index(i, len(self))
        where = f"{self._path} line {self._numbers[i]}"
        with self._path.open("rb") as file:
            file.seek(self._offsets[i])
            line = file.readline(self._max_bytes + 1)
        if len(line) > self._max_bytes:
            msg = (
                f"{where}: longer than {self._max_bytes >> 20} MiB, the most that a row may have; write one JSON "
                "object a line, without fields that the reward does not need"
            )
            raise RowError(msg)
        return task_of(_parsed(line, where), where, self._fields)


def _index(path: Path, size: int | None, most: int) -> tuple[array[int], array[int]]:
    """Byte offsets and line numbers of the first `size` rows."""
    offsets, numbers = array("Q"), array("Q")
    offset = number = 0
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        while len(offsets) != size and (line := file.readline(most + 1)):
            number += 1
            if len(line) > most or not line.isspace():
                offsets.append(offset)
                numbers.append(number)
            while len(line) > most and not line.endswith(b"\n"):
                offset += len(line)
                line = file.readline(most + 1)
            offset += len(line)
    return offsets, numbers


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
