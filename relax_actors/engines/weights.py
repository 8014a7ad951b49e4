"""Sets of weights as safetensors in Hugging Face names, and the fingerprint that tells two sets apart."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import safetensors
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from broker.errors import StoreError


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """xxh3-128 over names, dtypes, shapes and bytes of tensors, in the order of their names."""
    hasher = xxhash.xxh3_128()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        data = tensor.detach().contiguous().cpu()
        hasher.update(f"{name}|{data.dtype}|{tuple(data.shape)}|".encode())
        hasher.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def save(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as one safetensors file.

    Raises:
        OSError: it cannot be written; with errno ENOSPC if there is no space.
    """
    try:
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, path)
    except safetensors.SafetensorError as error:
        # The library hides the operating system's error in its text.
        full = f"os error {errno.ENOSPC}" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error


def load(shards: Sequence[Path]) -> dict[str, Tensor]:
    """Map the tensors of safetensors shards.

    Raises:
        StoreError: a shard is missing or is no safetensors file.
    """
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        try:
            with safetensors.safe_open(shard, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a mapping
        except (OSError, safetensors.SafetensorError) as error:
            msg = f"weights shard {shard} cannot be read: {error}"
            raise StoreError(msg) from error
    return tensors
