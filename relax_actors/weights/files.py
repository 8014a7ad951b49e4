"""Weight files in safetensors format, and the fingerprint of a set of weights."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import safetensors
import torch
import xxhash
from torch import Tensor

from relax_actors.errors import StoreError
from relax_actors.weights.protocols import PREFIX_BYTES

ENGINE = "engine.json"
"""File of a checkpoint that names the engine which wrote it, and the precision of the published weights."""
MAX_HEADER_BYTES = 32 << 20
DELTA_BASE_KEY = "delta_of"
"""Metadata key of a delta file: fingerprint of the weights that the delta applies to."""
WHOLE_KEY = "whole"
"""Metadata key of a file whose header has the names of parts: the header by the names of whole tensors."""


DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Data types in the header of a safetensors file."""
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Data type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """Return the form of a tensor, which may be on the device "meta"."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        count = 1
        for length in self.shape:
            count *= length
        return count * self.dtype.itemsize


class Fingerprint:
    """xxh3-128 digest of names, dtypes, shapes and bytes of tensors, in order of names."""

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_128()
        self._prefixes = bytearray()

    @property
    def prefixes(self) -> bytes:
        """2 bytes a tensor: a digest up to it, by which the first difference is found."""
        return bytes(self._prefixes)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add the next tensor, on any device."""
        data = tensor.detach().contiguous().cpu()
        self._hasher.update(f"{name}|{data.dtype}|{tuple(data.shape)}|".encode())
        self._hasher.update(memory_of(data))
        self._prefixes += self._hasher.digest()[:PREFIX_BYTES]

    def hexdigest(self) -> str:
        """Return the digest of the tensors so far."""
        return self._hasher.hexdigest()


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of a set of weights, read one by one; see `Fingerprint`."""
    digest = Fingerprint()
    for name in sorted(tensors):
        digest.add(name, tensors[name])
    return digest.hexdigest()


def check(tensors: Mapping[str, Tensor], version: int | str, published: str) -> None:
    """Compare the digest of a version; raises StoreError if it is not the published one."""
    if (digest := fingerprint(tensors)) != published:
        msg = f"weights {version} have fingerprint {digest}, published was {published}; not loaded"
        raise StoreError(msg)


def fingerprint_of_files(shards: Sequence[Path]) -> str:
    """Return the digest of safetensors shards, read one by one; see `Fingerprint`.

    Raises:
        StoreError: a shard is missing or is not a safetensors file.
    """
    digest = Fingerprint()
    with ExitStack() as stack:
        files = [stack.enter_context(_opened(shard)) for shard in shards]
        places = {name: file for file in files for name in file.keys()}  # noqa: SIM118 not a mapping
        for name in sorted(places):
            digest.add(name, places[name].get_tensor(name))
    return digest.hexdigest()


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU as bytes, which keep it alive.

    `Tensor.numpy` would forbid to resize the storage for good, and memory that leaves a device is resized.
    """
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memoryview(memory).cast("B")


class TensorFile:
    """Safetensors file whose tensors are written one at a time, in any order.

    A file that is there is replaced, so a process that has mapped it keeps its tensors. `forms` are of all tensors, by
    name. An open descriptor in place of a path stays open. `named` returns what the header has in place of tensors, on
    any device and in their order: the same under other names, or successive rows; `mapped` reads the whole ones.

    Raises:
        OSError: the file cannot be written; errno is ENOSPC if the disk is full.
    """

    def __init__(
        self,
        path: Path | int,
        forms: Mapping[str, TensorForm],
        metadata: Mapping[str, str] | None = None,
        named: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
    ) -> None:
        # Every tensor is aligned to its elements if the wider ones come first.
        ordered = dict(sorted(forms.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
        header = whole = _header(ordered)
        extra = dict(metadata or {})
        if named is not None:
            empty = {name: torch.empty(form.shape, dtype=form.dtype, device="meta") for name, form in ordered.items()}
            parts = {name: TensorForm.of(tensor) for name, tensor in named(empty).items()}
            if parts != ordered:
                header, extra[WHOLE_KEY] = _header(parts), json.dumps(whole, separators=(",", ":"))
        text = json.dumps(({"__metadata__": extra} if extra else {}) | header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._begin = 8 + len(text)
        self._offsets = {name: whole[name]["data_offsets"][0] for name in forms}
        if isinstance(path, Path) and path.is_file():
            path.unlink()
        self._file = open(path, "wb", closefd=isinstance(path, Path))  # noqa: SIM115 closed by __exit__
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, on any device."""
        self._file.seek(self._begin + self._offsets[name])
        self._file.write(memory_of(tensor.detach().contiguous().cpu()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _header(forms: Mapping[str, TensorForm]) -> dict[str, Any]:
    """Return the entries of tensors that follow each other."""
    header, end = {}, 0
    for name, form in forms.items():
        begin, end = end, end + form.nbytes
        header[name] = {"dtype": DTYPE_CODES[form.dtype], "shape": form.shape, "data_offsets": (begin, end)}
    return header


def save(tensors: Mapping[str, Tensor], path: Path | int, base: str | None = None) -> None:
    """Write tensors as a safetensors file, also to an open descriptor; a delta names the fingerprint of its `base`.

    Raises:
        OSError: the file cannot be written; errno is ENOSPC if the disk is full.
    """
    forms = {name: TensorForm.of(tensor) for name, tensor in tensors.items()}
    with TensorFile(path, forms, None if base is None else {DELTA_BASE_KEY: base}) as file:
        for name, tensor in tensors.items():
            file.write(name, tensor)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of safetensors while it writes into an OSError."""
    try:
        yield
    except safetensors.SafetensorError as error:
        # safetensors reports the operating system's error only in its text.
        full = f"os error {errno.ENOSPC}" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error


def load(shards: Sequence[Path]) -> dict[str, Tensor]:
    """Read the tensors of shards; raises StoreError if missing or not safetensors."""
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        with _opened(shard) as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a mapping
    return tensors


def mapped(path: Path) -> tuple[dict[str, Tensor], set[str]]:
    """Return the tensors of a file of `TensorFile` without copies, and the names in its header.

    They are views of one mapping, which stays when the file is removed. Nothing can write to it: an attempt ends the
    process.

    Raises:
        StoreError: it is missing or damaged.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length)) if length <= MAX_HEADER_BYTES else {}
            data = _read_only(file.fileno())
        whole, size, tensors = header.pop("__metadata__", {}).get(WHOLE_KEY), len(data), {}
        for name, entry in (header if whole is None else json.loads(whole)).items():
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            if end - begin != TensorForm(dtype, shape).nbytes or end > size:
                msg = f"{name} has other bytes than its header says"
                raise ValueError(msg)  # noqa: TRY301 reported below like every other damage
            tensors[name] = data[begin:end].view(dtype).view(shape)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"weights {path} cannot be read: {error}"
        raise StoreError(msg) from error
    return tensors, set(header)


def _read_only(descriptor: int) -> Tensor:
    """Map a file, and return its bytes, `[size] uint8`; the kernel counts the mapping as no memory of this process."""
    size = os.fstat(descriptor).st_size
    array = np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), np.uint8)
    # torch warns of buffers that cannot be written.
    memory: Any = (ctypes.c_char * size).from_address(array.ctypes.data)
    memory.mapping = array
    return torch.frombuffer(memory, dtype=torch.uint8)


def delta_base(shard: Path) -> str | None:
    """Return a delta's base fingerprint, None for full tensors; raises StoreError."""
    with _opened(shard) as file:
        return (file.metadata() or {}).get(DELTA_BASE_KEY)


@contextmanager
def _opened(shard: Path) -> Iterator[Any]:
    try:
        with _open(shard) as file:
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        msg = f"weights shard {shard} cannot be read: {error}"
        raise StoreError(msg) from error


def _open(shard: Path) -> Any:
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        # safetensors reads up to 100 MB of JSON, which take several times as much memory.
        msg = f"its header of {length} bytes is over the limit of {MAX_HEADER_BYTES}"
        raise OSError(msg)
    try:
        return safetensors.safe_open(shard, framework="pt")
    except RuntimeError as error:
        # safetensors opens the file, then torch opens it again and raises RuntimeError if it was removed in between.
        raise OSError(str(error)) from error
