"""Files of `data.path`: a file, a folder's files, or matches of a pattern."""

from __future__ import annotations

import difflib
import glob
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from relax_actors.data.field_names import FieldNames, listed
from relax_actors.data.fields import RowFields, check_index, task_of
from relax_actors.data.source import SourceSettings
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError, RowError

NAMED_ROWS = 100
"""Rows in which a field of [data.fields] must come at least once."""
_NUMBERED = re.compile(r"(?P<split>\w+)-\d+-of-\d+")
_SPLITS = "train|test|validation|valid|val|dev|eval"
_NAMED = re.compile(rf"(?P<split>{_SPLITS})([-_.]|$)")
_FOLDERS = frozenset(_SPLITS.split("|"))


def data_files(settings: SourceSettings, kind: str, endings: Sequence[str]) -> list[Path]:
    """Return the files of a source, in the order of their paths; empty ones are left out.

    Args:
        settings: settings of the source.
        kind: kind of the source, for errors.
        endings: file name endings that are read from a folder.

    Raises:
        ConfigError: no file matches, `data.split` matches no file, or a folder has several splits and none is chosen.
    """
    path = Path(settings.required("path", kind))
    where = f"data.path = {str(path)!r}"
    if path.is_file():
        chosen = [path] if settings.split is None else _of_split([path], path.parent, settings.split, where)
    elif path.is_dir():
        matching = [file for file in files_at(path) if file.name.endswith(tuple(endings))]
        if not matching:
            msg = (
                f"{where} is a folder without files {', '.join(f'*{ending}' for ending in endings)}; it has "
                f"{listed(sorted(file.name for file in path.iterdir()))}; correct data.path or data.kind"
            )
            raise ConfigError(msg)
        chosen = _of_split(matching, path, settings.split, where)
    elif glob.has_magic(str(path)):
        chosen = files_at(path)
        chosen = _of_split(chosen, folder_of(path), settings.split, where) if settings.split else chosen
        if not chosen:
            msg = f"{where} matches no file; correct the pattern"
            raise ConfigError(msg)
    else:
        what = "is no regular file" if path.exists() else "does not exist"
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*")], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        msg = f"{where} {what}{hint}; give the path of a file or a folder, absolute or from the working directory"
        raise ConfigError(msg)
    if not (full := [file for file in chosen if file.stat().st_size]):
        msg = f"{where} is empty; give a file with at least one row"
        raise ConfigError(msg)
    return full


def files_at(path: Path) -> list[Path]:
    """Return a file, a folder's files, or a pattern's matches, in the order of their paths.

    Hidden files, and those of hidden folders such as `.ipynb_checkpoints`, are left out unless a pattern names them.
    """
    if path.is_file():
        return [path]
    if path.is_dir():
        shown = (file for file in path.rglob("*") if not any(name.startswith(".") for name in _below(file, path)))
        return sorted(file for file in shown if file.is_file())
    paths = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207 an absolute pattern
    return sorted(file for file in paths if file.is_file())


def folder_of(path: Path) -> Path:
    """Return the folder that all files of `data.path` lie in."""
    if path.is_dir():
        return path
    above = path.parent
    while glob.has_magic(str(above)):
        above = above.parent
    return above


def _below(path: Path, folder: Path) -> tuple[str, ...]:
    """Return the names that lead from a folder to a path in it."""
    return path.parts[len(folder.parts) :]


def _split_of(file: Path, folder: Path) -> str | None:
    """Return the split that a folder or the name of a file says; None if neither does."""
    above = [name for name in _below(file.parent, folder) if name in _FOLDERS]
    match = _NUMBERED.match(file.name) or _NAMED.match(file.name)
    return above[-1] if above else match and match["split"]


def _of_split(files: list[Path], folder: Path, split: str | None, where: str) -> list[Path]:
    """Return a split's files: `train.jsonl`, `train-00000-of-00002.parquet`, `train/...`."""
    if split is None:
        splits = {_split_of(file, folder) for file in files}
        named = sorted(split for split in splits if split)
        if len(splits) > 1 and named != ["train"]:
            unnamed = " and files that name no split" if None in splits else ""
            msg = (
                f"{where} has files of the split{'s' * (len(named) > 1)} {listed(named)}{unnamed}; choose one by "
                "data.split, or name the files to read by a pattern"
            )
            raise ConfigError(msg)
        return files
    own = re.compile(rf"{re.escape(split)}([-_.]|$)")
    chosen = [file for file in files if own.match(file.name) or split in _below(file.parent, folder)]
    if not chosen:
        msg = f"data.split = {split!r}, but {where} has no such files; files: {listed(file.name for file in files)}"
        raise ConfigError(msg)
    return chosen


class FileRows(ABC):
    """Tasks of the rows of files in order; raises ConfigError for bad `data.fields`."""

    def __init__(self, paths: Sequence[Path], settings: SourceSettings) -> None:
        self.paths, self.names = paths, FieldNames(settings.fields)
        self._fields = [RowFields(self.names, path.parent, settings.media_bytes) for path in paths]
        self.max_bytes = RowFields(self.names, Path(), settings.media_bytes).max_bytes
        self._ends: list[int] = []
        self._size = 0

    def set_counts(self, counts: Sequence[int], size: int | None, where: str) -> None:
        """Set the rows of each file, at most `size` in all, and check the named fields.

        Raises:
            ConfigError: there are no rows, or a field that `data.fields` names is in none of the first ones.
        """
        self._ends = list(accumulate(counts))
        self._size = self._ends[-1] if size is None else min(size, self._ends[-1])
        if not self._size:
            msg = f"{where} has no rows; give a file with at least one row"
            raise ConfigError(msg)
        rows = []
        for i in range(min(NAMED_ROWS, self._size) if self.names.names else 0):
            with suppress(RowError):
                rows.append(self.read(*self.locate(i)))
        self.names.check(rows, where)

    def locate(self, i: int) -> tuple[int, int]:
        """Return the file of a row and its number in it, counted from 0."""
        file = bisect_right(self._ends, i)
        return file, i - (self._ends[file - 1] if file else 0)

    @abstractmethod
    def read(self, file: int, number: int) -> object:
        """Return a decoded row; raises RowError if it cannot be decoded."""

    @abstractmethod
    def place(self, file: int, number: int) -> str:
        """Return the place of a row, for errors."""

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> Task:
        check_index(i, self._size)
        file, number = self.locate(i)
        return task_of(self.read(file, number), self.place(file, number), self._fields[file])
