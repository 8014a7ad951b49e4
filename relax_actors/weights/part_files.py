"""A safetensors file that several processes write, each its rows of tensors.

A process writes to ranges of the file that no other one writes to, so nothing is sent and nobody waits. The file is
complete when all of them have returned, and has the same bytes for any number of processes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from relax_actors.weights.files import DTYPE_CODES, memory_of

_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a tensor that a process has.

    Attributes:
        rows: contiguous rows of it; without elements if it has none.
        shape: shape of the whole tensor.
        first: number of the first of the rows.
    """

    rows: Tensor
    shape: tuple[int, ...]
    first: int = 0


def save(parts: Mapping[str, Part], path: Path) -> None:
    """Write this process's rows; all must give the same names, dtypes and shapes.

    Raises:
        OSError: the file cannot be written; errno is ENOSPC if the disk is full.
    """
    # Larger elements first, so that every tensor is aligned.
    names = sorted(parts, key=lambda name: (-parts[name].rows.element_size(), name))
    header: dict[str, object] = {}
    starts, end = {}, 0
    for name in names:
        part = parts[name]
        starts[name], size = end, math.prod(part.shape) * part.rows.element_size()
        end += size
        offsets = [starts[name], end]
        header[name] = {"dtype": DTYPE_CODES[part.rows.dtype], "shape": list(part.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        # Every process does these two, because none waits for another.
        os.ftruncate(descriptor, len(head) + end)
        _write(descriptor, head, 0)
        for name in names:
            part = parts[name]
            row = math.prod(part.shape[1:]) * part.rows.element_size()
            data = memory_of(part.rows.detach().contiguous().cpu())
            _write(descriptor, data, len(head) + starts[name] + part.first * row)
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
