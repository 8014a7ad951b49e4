"""Tensors by reference: one safetensors segment a cell, in a folder that mirrors the subjects.

A segment is written to a temporary name, renamed, and only then published, so that a reference never points at
something half-written. Readers map it without a copy and check the checksum.
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
import xxhash
from numpy.typing import NDArray

from broker.codec import Array, dtype_name
from broker.errors import StoreError, StoreFullError
from broker.fields import TensorRef
from broker.subjects import RowId

T = TypeVar("T")
Bytes = NDArray[np.uint8]
INLINE_BYTES = 8 << 10
_ALIGN = 64


def digest(data: Any) -> str:
    """xxh3-128 of a buffer, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


class Store:
    """The folder of a run's segments.

    Args:
        root: the folder; made when something is written.
        when_full: called when there is no room for a file; it waits, or raises the error to give up.
    """

    def __init__(self, root: Path, when_full: Callable[[StoreFullError], None] | None = None) -> None:
        self.root = root.resolve()
        self.when_full = when_full or raise_it
        self._folders: set[str] = set()

    def path(self, uri: str) -> Path:
        """The file of a reference.

        Raises:
            StoreError: the path leaves the store, by `..`, an absolute path or a link.
        """
        try:
            path = Path(os.path.realpath(os.path.join(self.root, uri)))  # noqa: PTH118 hot
        except (OSError, ValueError, RuntimeError) as error:
            msg = f"reference {uri[:80]!r} is no path in the store: {error}"
            raise StoreError(msg) from error
        if not path.is_relative_to(self.root):
            raise _outside(self.root, uri)
        return path

    def read(self, reference: TensorRef) -> Array:
        """Map the array of a reference, read-only, after checking its checksum.

        Raises:
            StoreError: the segment is missing, too short or its bytes are not those that were written.
        """
        return self.reader()(reference)

    def reader(self) -> Callable[[TensorRef], Array]:
        """As `read`, for the arrays of one cell: their segment is mapped once."""
        mapped: dict[str, Bytes] = {}

        def read(reference: TensorRef) -> Array:
            if reference.uri not in mapped:
                mapped[reference.uri] = self._map(reference.uri)
            return _array(mapped[reference.uri], reference)

        return read

    def _map(self, uri: str) -> Bytes:
        try:
            fd = os.open(os.path.join(self.root, uri), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # noqa: PTH118 hot
        except (OSError, ValueError) as error:
            self.path(uri)  # one that leaves the store is told as that
            msg = f"segment {uri[:80]} is missing or empty: {error}"
            raise StoreError(msg) from error
        try:
            # What was opened decides, wherever links led: one look instead of one at each folder of the path.
            if not os.readlink(f"/proc/self/fd/{fd}").startswith(f"{self.root}/"):  # noqa: PTH115
                raise _outside(self.root, uri)
            return np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as error:
            msg = f"segment {uri[:80]} is missing or empty: {error}"
            raise StoreError(msg) from error
        finally:
            os.close(fd)

    def write(self, uri: str, save: Callable[[Path], T]) -> T:
        """Let `save` write a file under a temporary name, then rename it to `uri`; gives what `save` gave.

        Raises:
            StoreFullError: no space left, and `when_full` gave up.
        """
        path = self.path(uri)
        # Two lives of one actor may write the same segment at once: each under a name of its own.
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

        return with_room(attempt, self.root, f"segment {uri}", self.when_full)

    def write_parts(self, uri: str, parts: list[Any]) -> None:
        """As `write`, of buffers one after the other; for many small files in few folders."""
        folder, _, name = uri.rpartition("/")
        if folder not in self._folders:
            self.write(uri, partial(_save_parts, parts))
            if len(self._folders) > _FOLDERS:
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
            with_room(attempt, self.root, f"segment {uri}", self.when_full)
        except FileNotFoundError:
            # The folder was removed in the meantime.
            self._folders.discard(folder)
            self.write(uri, partial(_save_parts, parts))

    def segment(self, row: RowId, field: str, author: str) -> SegmentWriter:
        """A writer for the arrays of one cell as one author writes it.

        The author is part of the name: of two that write one cell, the one refused must not have touched the other's.
        """
        by = author.replace("#", "-")
        return SegmentWriter(self, f"{row.kind}/{row.step}/{row.index}.{field}.{by}.safetensors")

    def names(self, uri: str) -> list[str]:
        """What lies in a folder of the store; nothing if it is not there."""
        path = self.path(uri)
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def remove(self, uri: str) -> None:
        """Remove a file or a folder of the store; nothing happens if it is not there."""
        path = self.path(uri)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class SegmentWriter:
    """Collects the large arrays of one cell; `close` writes them as one segment.

    Use `place` while encoding. Since references carry offsets, arrays are laid out as they come.
    """

    def __init__(self, store: Store, uri: str) -> None:
        self._store = store
        self._uri = uri
        self._arrays: list[Array] = []
        self._size = 0

    def place(self, array: Array) -> TensorRef | None:
        """Take an array above the inline threshold and give its reference."""
        if array.nbytes <= INLINE_BYTES:
            return None
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        data = np.ascontiguousarray(array)
        offset = self._header_size() + self._size
        self._arrays.append(data)
        self._size += -(-data.nbytes // _ALIGN) * _ALIGN
        sum_ = digest(data.reshape(-1).view(np.uint8))
        return TensorRef(self._uri, offset, data.nbytes, dtype_name(data.dtype), data.shape, sum_)

    @staticmethod
    def _header_size() -> int:
        # A header of fixed length lets offsets be known before all arrays are.
        return 8 + _HEADER_BYTES

    def close(self) -> bool:
        """Write the segment if any array was placed; tells whether there was one."""
        if not self._arrays:
            return False
        self._store.write_parts(self._uri, self._parts())
        return True

    def _parts(self) -> list[Any]:
        entries: list[str] = []
        parts: list[Any] = []
        offset = 0
        for i, array in enumerate(self._arrays):
            shape = ",".join(map(str, array.shape))
            ends = f"[{offset},{offset + array.nbytes}]"
            kind = _SAFETENSORS[dtype_name(array.dtype)]
            entries.append(f'"{i}":{{"dtype":"{kind}","shape":[{shape}],"data_offsets":{ends}}}')
            offset += array.nbytes
            parts.append(array.reshape(-1).view(np.uint8).data)
            if pad := -array.nbytes % _ALIGN:  # the format allows no gap between tensors
                entries.append(f'"pad{i}":{{"dtype":"U8","shape":[{pad}],"data_offsets":[{offset},{offset + pad}]}}')
                offset += pad
                parts.append(bytes(pad))
        header = ("{" + ",".join(entries) + "}").encode()
        if len(header) > _HEADER_BYTES:
            msg = f"segment {self._uri} has {len(self._arrays)} arrays, more than its header can name"
            raise StoreError(msg)
        return [_HEADER_BYTES.to_bytes(8, "little") + header.ljust(_HEADER_BYTES), *parts]


def _save_parts(parts: list[Any], path: Path | str) -> None:
    with open(path, "wb", buffering=0) as file:  # noqa: PTH123 hot
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[file.write(view) :]


def _outside(root: Path, uri: str) -> StoreError:
    return StoreError(f"reference {uri!r} points outside the store {root}; it was not read")


def _array(segment: Bytes, reference: TensorRef) -> Array:
    """The array of a reference as a view of its segment, its checksum checked."""
    data = segment[reference.offset : reference.offset + reference.nbytes]
    if len(data) != reference.nbytes:
        msg = f"segment {reference.uri} holds {len(segment)} bytes, too few for {reference}"
        raise StoreError(msg)
    if digest(data) != reference.xxh3_128:
        msg = f"segment {reference.uri} is corrupt: its checksum is not {reference.xxh3_128}"
        raise StoreError(msg)
    try:
        array: Array = data.view(reference.dtype).reshape(reference.shape)
    except (ValueError, OverflowError) as error:
        msg = f"segment {reference.uri} holds no array of shape {reference.shape}: {error}"
        raise StoreError(msg) from error
    return array


_HEADER_BYTES = 4096 - 8
_FOLDERS = 1024
_SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}


def raise_it(error: StoreFullError) -> None:
    """Give up at once."""
    raise error


def with_room(work: Callable[[], T], root: Path, what: str, when_full: Callable[[StoreFullError], None]) -> T:
    """Do work that writes files below `root`, again and again for want of room, until `when_full` gives up.

    Raises:
        StoreFullError: by `when_full`; names `what` and the room there is.
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
            when_full(full)
