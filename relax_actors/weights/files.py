"""Sets of weights as safetensors in Hugging Face names, and the fingerprint that tells two sets apart."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from relax_actors.errors import StoreError

DELTA_OF = "delta_of"
"""Key of a delta file's metadata: what it applies to."""


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """xxh3-128 over names, dtypes, shapes and bytes of tensors, in the order of their names."""
    hasher = xxhash.xxh3_128()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        data = tensor.detach().contiguous().cpu()
        hasher.update(f"{name}|{data.dtype}|{tuple(data.shape)}|".encode())
        hasher.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def save(tensors: Mapping[str, Tensor], path: Path, base: str | None = None) -> None:
    """Write tensors as one safetensors file; those of a delta with the fingerprint of the weights it applies to.

    Raises:
        OSError: it cannot be written; with errno ENOSPC if there is no space.
    """
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    with errors_of_the_disk(path):
        save_file(plain, path, metadata=None if base is None else {DELTA_OF: base})


@contextmanager
def errors_of_the_disk(path: Path) -> Iterator[None]:
    """Turn what safetensors raises while it writes into an OSError."""
    try:
        yield
    except safetensors.SafetensorError as error:
        # The library hides the operating system's error in its text.
        full = f"os error {errno.ENOSPC}" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error


def load(shards: Sequence[Path]) -> dict[str, Tensor]:
    """The tensors of safetensors shards, in memory of their own.

    Raises:
        StoreError: a shard is missing or is no safetensors file.
    """
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        with _opened(shard) as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a mapping
    return tensors


def base_of(shard: Path) -> str | None:
    """Fingerprint of the weights that a shard is a delta to; None if it holds whole tensors.

    Raises:
        StoreError: it is missing or is no safetensors file.
    """
    with _opened(shard) as file:
        return (file.metadata() or {}).get(DELTA_OF)


@contextmanager
def _opened(shard: Path) -> Iterator[Any]:
    try:
        with _open(shard) as file:
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        msg = f"weights shard {shard} cannot be read: {error}"
        raise StoreError(msg) from error


def _open(shard: Path) -> Any:
    try:
        return safetensors.safe_open(shard, framework="pt")
    except RuntimeError as error:
        # The library opens the file, then has torch open it again, which has words of its own if it is gone by then.
        raise OSError(str(error)) from error
