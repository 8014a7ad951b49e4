"""Store of a run's tensors: one segment file per cell, in folders that mirror subjects.

A segment is written under a temporary name, renamed, and only then referenced by a published cell, so a reference never
points to a partial file. Readers map it without a copy and verify the checksum.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from broker.codec import Array
from broker.errors import StoreError, StoreFullError
from broker.fields import TensorRef
from broker.segment import Bytes, SegmentWriter, array_view
from broker.subjects import RowId

T = TypeVar("T")
_MAX_KNOWN_FOLDERS = 1024


def raise_error(error: StoreFullError) -> None:
    """Raise the error; the default of `on_full`."""
    raise error


def retry_when_full(work: Callable[[], T], root: Path, what: str, on_full: Callable[[StoreFullError], None]) -> T:
    """Run `work`, and repeat it while the disk or the quota is full.

    Args:
        work: writes files below `root`; must be safe to repeat.
        root: folder whose free space is reported.
        what: names the files in the error.
        on_full: called when there is no space; waits and returns to retry, or raises to give up.

    Raises:
        StoreFullError: `on_full` gave up.
    """
    while True:
        try:
            return work()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            free = 0
            with suppress(OSError):
                free = shutil.disk_usage(root).free >> 20
            msg = f"{root} has {free} MiB free, too little for {what}; free space or set store.path"
            full = StoreFullError(msg)
            full.__cause__ = error
            on_full(full)


class Store:
    """Folder of a run's segments. May be used from any thread.

    Args:
        root: the folder; created on the first write.
        on_full: called when there is no space for a file; waits and returns to retry, or raises to give up.
    """

    def __init__(self, root: Path, on_full: Callable[[StoreFullError], None] | None = None) -> None:
        self.root = root.resolve()
        self.on_full = on_full or raise_error
        self._folders: set[str] = set()

    def path(self, uri: str) -> Path:
        """Return the path of a file of the store.

        Raises:
            StoreError: the path leaves the store, by `..`, as an absolute path or through a link.
        """
        try:
            path = Path(os.path.realpath(os.path.join(self.root, uri)))  # noqa: PTH118 hot
        except (OSError, ValueError, RuntimeError) as error:
            msg = f"reference {uri[:80]!r} is not a path in the store: {error}"
            raise StoreError(msg) from error
        if not path.is_relative_to(self.root):
            raise _outside(self.root, uri)
        return path

    def read(self, reference: TensorRef) -> Array:
        """Map the array of a reference read-only, after verifying its checksum.

        Raises:
            StoreError: the segment is missing, too short or corrupt.
        """
        return self.reader()(reference)

    def reader(self) -> Callable[[TensorRef], Array]:
        """Return a function like `read` for the arrays of one cell, which maps each segment once."""
        mapped: dict[str, Bytes] = {}

        def read(reference: TensorRef) -> Array:
            if reference.uri not in mapped:
                mapped[reference.uri] = self._map(reference.uri)
            return array_view(mapped[reference.uri], reference)

        return read

    def _map(self, uri: str) -> Bytes:
        try:
            fd = os.open(os.path.join(self.root, uri), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # noqa: PTH118 hot
        except (OSError, ValueError) as error:
            self.path(uri)  # raises the error of a path outside the store
            msg = f"segment {uri[:80]} is missing or empty: {error}"
            raise StoreError(msg) from error
        try:
            # Check the opened file instead of resolving the path: one system call instead of one per folder.
            if not os.readlink(f"/proc/self/fd/{fd}").startswith(f"{self.root}/"):  # noqa: PTH115
                raise _outside(self.root, uri)
            return np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as error:
            msg = f"segment {uri[:80]} is missing or empty: {error}"
            raise StoreError(msg) from error
        finally:
            os.close(fd)

    def write(self, uri: str, save: Callable[[Path], T]) -> T:
        """Write a file atomically: `save` writes a temporary file, which is renamed to `uri`.

        Returns:
            The result of `save`.

        Raises:
            StoreFullError: no space is left, and `on_full` gave up.
        """
        path = self.path(uri)
        # Two incarnations of one actor may write the same segment at once, so the temporary name contains the pid.
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

        def attempt() -> T:
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
            try:
                result = save(temporary)
                temporary.rename(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            return result

        return retry_when_full(attempt, self.root, f"segment {uri}", self.on_full)

    def write_parts(self, uri: str, parts: list[Any]) -> None:
        """Write buffers one after the other to a file, atomically.

        Faster than `write` for many small files in few folders: a known folder is not checked again.

        Raises:
            StoreFullError: no space is left, and `on_full` gave up.
        """
        folder, _, name = uri.rpartition("/")
        if folder not in self._folders:
            self.write(uri, partial(_save_parts, parts))
            if len(self._folders) > _MAX_KNOWN_FOLDERS:
                self._folders.clear()
            self._folders.add(folder)
            return
        temporary = f"{self.root}/{folder}/.{name}.{os.getpid()}.tmp"

        def attempt() -> None:
            try:
                _save_parts(parts, temporary)
                os.rename(temporary, f"{self.root}/{uri}")  # noqa: PTH104 hot
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)  # noqa: PTH108 hot
                raise

        try:
            retry_when_full(attempt, self.root, f"segment {uri}", self.on_full)
        except FileNotFoundError:
            # The folder was removed since the last write.
            self._folders.discard(folder)
            self.write(uri, partial(_save_parts, parts))

    def segment_writer(self, row: RowId, field: str, author: str) -> SegmentWriter:
        """Return a writer for the large arrays of one cell.

        The author is part of the file's name: of two authors of one cell, the refused one must not have overwritten the
        segment of the other.
        """
        by = author.replace("#", "-")
        return SegmentWriter(f"{row.kind}/{row.step}/{row.index}.{field}.{by}.safetensors", self.write_parts)

    def list_names(self, uri: str) -> list[str]:
        """Return the sorted names in a folder of the store; empty if the folder does not exist."""
        path = self.path(uri)
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def remove(self, uri: str) -> None:
        """Remove a file or a folder of the store; do nothing if it does not exist."""
        path = self.path(uri)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _save_parts(parts: list[Any], path: Path | str) -> None:
    with open(path, "wb", buffering=0) as file:  # noqa: PTH123 hot
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[file.write(view) :]


def _outside(root: Path, uri: str) -> StoreError:
    return StoreError(f"reference {uri!r} points outside the store {root}; it was not read")
