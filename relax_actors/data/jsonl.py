"""Data source of JSON Lines files: one JSON object a line."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

from relax_actors.data.fields import check_file, check_index, task_of
from relax_actors.data.source import SourceSettings
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError, RowError


def open_jsonl(settings: SourceSettings) -> JsonLines:
    """Open `data.path` as JSON Lines.

    Raises:
        ConfigError: no such file, or it has no rows.
    """
    path = Path(settings.required("path", "jsonl"))
    return JsonLines(path, settings.size, settings.prompt_field, settings.answer_field)


class JsonLines:
    """Tasks of a JSON Lines file; blank lines are ignored.

    The start of each line is indexed once (16 bytes a row); a line is read when its task is used.
    """

    def __init__(self, path: Path, size: int | None, prompt_field: str, answer_field: str) -> None:
        check_file(path)
        self._path = path
        self._prompt_field, self._answer_field = prompt_field, answer_field
        self._offsets, self._numbers = _index(path, size)
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
            line = file.readline()
        return task_of(_parsed(line, where), where, self._prompt_field, self._answer_field)


def _index(path: Path, size: int | None) -> tuple[array[int], array[int]]:
    """Byte offsets and line numbers of the first `size` rows."""
    offsets, numbers = array("Q"), array("Q")
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                offsets.append(offset)
                numbers.append(number)
            if len(offsets) == size:
                break
            offset += len(line)
    return offsets, numbers


def _parsed(line: bytes, where: str) -> object:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        msg = f"{where}: no UTF-8 ({error.reason} at byte {error.start + 1}); save the file as UTF-8"
    except json.JSONDecodeError as error:
        msg = f"{where}: no JSON ({error.msg} at column {error.colno}); write one JSON object a line"
    except RecursionError:
        msg = f"{where}: nested too deeply; flatten the row"
    except ValueError as error:
        msg = f"{where}: no JSON that Python reads ({error}); write the number as text"
    raise RowError(msg)
