"""Weight files in safetensors format, and the fingerprint of a set of weights."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from relax_actors.errors import StoreError

ENGINE = "engine.json"
"""File of a checkpoint that names the engine which wrote it, and the precision of the published weights."""
MAX_HEADER_BYTES = 32 << 20
DELTA_BASE_KEY = "delta_of"
"""Metadata key of a delta file: fingerprint of the weights that the delta applies to."""


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return the xxh3-128 hex digest of names, dtypes, shapes and bytes; reads one tensor after the other, by name."""
    hasher = xxhash.xxh3_128()
    for name in sorted(tensors):
        data = tensors[name].detach().contiguous().cpu()
        hasher.update(f"{name}|{data.dtype}|{tuple(data.shape)}|".encode())
        hasher.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def save(tensors: Mapping[str, Tensor], path: Path, base: str | None = None) -> None:
    """Write tensors as one safetensors file.

    Args:
        tensors: by name, on any device.
        path: file to write.
        base: for a delta, the fingerprint of the weights that it applies to.

    Raises:
        OSError: the file cannot be written; errno is ENOSPC if the disk is full.
    """
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    with disk_errors(path):
        save_file(plain, path, metadata=None if base is None else {DELTA_BASE_KEY: base})


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
    """Read the tensors of safetensors shards into memory.

    Raises:
        StoreError: a shard is missing or is not a safetensors file.
    """
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        with _opened(shard) as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a mapping
    return tensors


def delta_base(shard: Path) -> str | None:
    """Return the base fingerprint of a delta file; None if it holds full tensors.

    Raises:
        StoreError: the shard is missing or is not a safetensors file.
    """
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
