"""Store of a run's tensors: segment files in a folder for each step of a kind of row.

A segment holds the large arrays of cells of one step that one author wrote together. It is written under a temporary
name, renamed, and only then referenced by a published cell, so a reference never points to a partial file. Readers map
it without a copy and verify the checksum.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from broker.codec import Array, Resolver
from broker.errors import StoreError, StoreFullError
from broker.fields import TensorRef
from broker.segment import INLINE_BYTES, Bytes, SegmentWriter, array_view
from broker.subjects import RowId

T = TypeVar("T")
_MAX_KNOWN_FOLDERS = 1024
_IOV_MAX = 1024
"""Most buffers that one system call writes."""


def raise_error(error: BaseException) -> None:
    """Raise the error; the default of `on_full`."""
    raise error


def retry_when_full(work: Callable[[], T], root: Path, what: str, on_full: Callable[[StoreFullError], None]) -> T:
    """Run `work`, which is repeatable, until the disk or the quota has room below `root`.

    `on_full` is called when there is no space: it waits and returns to retry, or raises to give up. `what` names the
    files in the StoreFullError that is raised then.
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
    """Folder of a run's segments, created on the first write. May be used from any thread.

    `on_full` is called when there is no space for a file: it waits and returns to retry, or raises to give up.
    """

    def __init__(self, root: Path, on_full: Callable[[StoreFullError], None] | None = None) -> None:
        self.root = root.resolve()
        self.on_full = on_full or raise_error
        self._folders: set[str] = set()
        self._serials, self._nonce = count(), secrets.token_hex(4)
        self.is_read_only = False
        """Whether the store is on a read-only file system, as in a sandbox: arrays are then written into the cells."""
        with suppress(OSError):
            self.is_read_only = bool(os.statvfs(self.root).f_flag & os.ST_RDONLY)
        self._lock = threading.Lock()
        self._remover: ThreadPoolExecutor | None = None

    def path(self, uri: str) -> Path:
        """Return the path of a file; raises StoreError if it is outside of the store."""
        try:
            path = Path(os.path.realpath(os.path.join(self.root, uri)))  # noqa: PTH118 hot
        except (OSError, ValueError, RuntimeError) as error:
            msg = f"reference {uri[:80]!r} is not a path in the store: {error}"
            raise StoreError(msg) from error
        if not path.is_relative_to(self.root):
            raise _outside(self.root, uri)
        return path

    def read(self, reference: TensorRef) -> Array:
        """Map the array of a reference read-only; raises StoreError if missing or corrupt."""
        return self.reader()(reference)

    def reader(self) -> Resolver:
        """Return a function like `read` that maps each segment once, for cells read together."""
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
        """Write a file atomically: `save` writes a temporary file, renamed to `uri`.

        Raises:
            StoreFullError: no space is left, and `on_full` gave up.
        """
        return self.write_together([uri], save)

    def write_together(self, uris: Sequence[str], save: Callable[..., T]) -> T:
        """Write several files like `write`; none is visible before all are written."""
        paths = [self.path(uri) for uri in uris]
        # Two incarnations of one actor may write the same segment at once, so the temporary name contains the pid.
        temporary = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in paths]

        def attempt() -> T:
            for path in paths:
                if not path.parent.is_dir():
                    path.parent.mkdir(parents=True, exist_ok=True)
            try:
                result = save(*temporary)
                for written, path in zip(temporary, paths, strict=True):
                    written.rename(path)
            except BaseException:
                for path in temporary:
                    path.unlink(missing_ok=True)
                raise
            return result

        return retry_when_full(attempt, self.root, f"segment {uris[0]}", self.on_full)

    def write_parts(self, uri: str, parts: list[Any]) -> None:
        """Write buffers one after the other to a file, atomically.

        Faster than `write` for many small files: a known folder is not checked again.

        Raises:
            StoreFullError: no space is left, and `on_full` gave up.
        """
        folder, _, name = uri.rpartition("/")
        # Two containers or threads may write the same shared file at once, so pids alone are not unique.
        author = f"{self._nonce}.{os.getpid()}.{threading.get_ident():x}"
        temporary = f"{self.root}/{folder}/.{name}.{author}.tmp"

        def attempt() -> None:
            if folder not in self._folders:
                self._make_folder(folder)
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
            retry_when_full(attempt, self.root, f"segment {uri}", self.on_full)

    def _make_folder(self, folder: str) -> None:
        """Make a folder of the store and remember that it is inside the store."""
        if len(self._folders) > _MAX_KNOWN_FOLDERS:
            self._folders.clear()
        parent = folder.rpartition("/")[0]
        if parent in self._folders:
            # A folder that this call creates is no link, so its path needs no check.
            with suppress(FileExistsError, FileNotFoundError):
                os.mkdir(f"{self.root}/{folder}")  # noqa: PTH102 hot
                self._folders.add(folder)
                return
        self.path(folder).mkdir(parents=True, exist_ok=True)
        self._folders |= {parent, folder}

    def segment_writer(self, row: RowId, field: str, author: str) -> SegmentWriter:
        """Return a writer for the large arrays of cells of one step that are written together.

        A segment is named after the first cell, its author and a serial number, so no segment is written twice: of two
        authors of one cell, the refused one must not have overwritten the segment of the other.
        """
        stem = f"{row.kind}/{row.step}/{row.index}.{field}.{author.replace('#', '-')}"
        inline = sys.maxsize if self.is_read_only else INLINE_BYTES
        return SegmentWriter(lambda: f"{stem}.{next(self._serials)}.safetensors", self.write_parts, inline)

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

    def remove_later(self, uri: str) -> None:
        """Remove like `remove`, in a thread: the file system's journal may wait milliseconds.

        The next call for the same folder removes the files that a killed process left.
        """
        with self._lock:
            if self._remover is None:
                self._remover = ThreadPoolExecutor(1, "store-remover")
            self._remover.submit(self.remove, uri)

    def close(self) -> None:
        """Wait until everything given to `remove_later` is removed."""
        with self._lock:
            remover, self._remover = self._remover, None
        if remover is not None:
            remover.shutdown()


def _save_parts(parts: list[Any], path: Path | str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        left: deque[memoryview[int]] = deque(memoryview(part) for part in parts)
        while left:
            written = os.writev(fd, list(islice(left, _IOV_MAX)))
            while left and written >= len(left[0]):
                written -= len(left.popleft())
            if written:
                left[0] = left[0][written:]
    finally:
        os.close(fd)


def _outside(root: Path, uri: str) -> StoreError:
    return StoreError(f"reference {uri!r} points outside the store {root}; it was not read")
