"""Weight files in safetensors format, and the fingerprint of a set of weights."""

from __future__ import annotations

import ctypes
import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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
    name. An open descriptor in place of a path stays open.

    Raises:
        OSError: the file cannot be written; errno is ENOSPC if the disk is full.
    """

    def __init__(
        self, path: Path | int, forms: Mapping[str, TensorForm], metadata: Mapping[str, str] | None = None
    ) -> None:
        header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
        end = 0
        # Every tensor is aligned to its elements if the wider ones come first.
        for name, form in sorted(forms.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
            begin, end = end, end + form.nbytes
            header[name] = {"dtype": DTYPE_CODES[form.dtype], "shape": form.shape, "data_offsets": (begin, end)}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._begin = 8 + len(text)
        self._offsets = {name: header[name]["data_offsets"][0] for name in forms}
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
