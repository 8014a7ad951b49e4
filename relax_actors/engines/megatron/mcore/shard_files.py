"""Files of a sharded checkpoint: safetensors and JSON, written by each rank for itself, readable by any layout.

`rank.<n>.safetensors` holds flat pieces of tensors, `rank.<n>.json` says of which: the parameter's key in the whole
model, the shard of it under the layout of the writer, and where the piece begins in the shard. megatron-core's own
checkpoints gather the optimizer state of data-parallel ranks, and exchange and store pickles, so they are not used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from relax_actors.engines.megatron.conversion import EMBEDDING, OUTPUT, merge_shards, shard_of
from relax_actors.weights import files as weights


@dataclass(frozen=True, slots=True)
class LocalShard:
    """Parameter of this rank: shard number `shard` of `shards`."""

    parameter: Tensor
    shards: int
    shard: int


@dataclass(frozen=True, slots=True)
class Piece:
    """State of a part of a shard.

    Attributes:
        key: of the parameter.
        local: shard.
        start: of the part, in the flattened shard.
        tensors: flat tensors by what they are.
        step: of the optimizer; None if it has no state, or none of its own.
    """

    key: str
    local: LocalShard
    start: int
    tensors: Mapping[str, Tensor]
    step: float | None = None


def writer(pieces: Iterable[Piece], rank: int, *, copies: bool) -> Callable[[Path], None]:
    """Return a function that writes pieces of this rank to a folder.

    It is called while training continues if they are copied first (`copies`).
    """
    tensors: dict[str, Tensor] = {}
    index: list[dict[str, Any]] = []
    for piece in pieces:
        local = piece.local
        entry: dict[str, Any] = {"key": piece.key, "shards": local.shards, "shard": local.shard, "step": piece.step}
        entry |= {"shape": list(local.parameter.shape), "start": piece.start, "tensors": sorted(piece.tensors)}
        for name, tensor in piece.tensors.items():
            kept = tensor.detach().reshape(-1)
            tensors[f"{len(index)}.{name}"] = kept.to("cpu", copy=True) if copies else kept
        index.append(entry)

    def write(folder: Path) -> None:
        weights.save(tensors, folder / f"rank.{rank}.safetensors")
        (folder / f"rank.{rank}.json").write_text(json.dumps(index))

    return write


@dataclass(frozen=True, slots=True)
class _Stored:
    """Piece in a file."""

    file: Any
    name: str
    shards: int
    shard: int
    shape: tuple[int, ...]
    start: int
    length: int


class StoredPieces:
    """Pieces of all ranks, each read on access; `stack` closes the files."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._stored: dict[tuple[str, str], list[_Stored]] = {}
        self._steps: dict[str, float | None] = {}
        for path in sorted(folder.glob("rank.*.safetensors")):
            file: Any = stack.enter_context(safetensors.safe_open(path, framework="pt"))
            for number, entry in enumerate(json.loads(path.with_suffix(".json").read_text())):
                place = entry["shards"], entry["shard"], tuple(entry["shape"]), entry["start"]
                if entry["tensors"] != ["reference"]:
                    self._steps[entry["key"]] = entry["step"]
                for name in entry["tensors"]:
                    (length,) = file.get_slice(f"{number}.{name}").get_shape()
                    stored = _Stored(file, f"{number}.{name}", *place, length)
                    self._stored.setdefault((name, entry["key"]), []).append(stored)

    def step(self, key: str) -> float | None:
        """Step of the optimizer for a parameter."""
        return self._steps.get(key)

    def has(self, name: str, key: str) -> bool:
        """Whether there is such a tensor of a parameter."""
        return (name, key) in self._stored

    def read(self, name: str, key: str, local: LocalShard, span: range | None = None) -> Tensor:
        """Read a part of a shard, flat; the layout that wrote it may have been another one.

        Args:
            name: what to read.
            key: of the parameter.
            local: shard of this layout.
            span: part of the flattened shard; all of it if not given.

        Raises:
            ValueError: it is not in the checkpoint, or not all of it.
        """
        shape, stored = tuple(local.parameter.shape), self._stored.get((name, key), [])
        span = range(local.parameter.numel()) if span is None else span
        if all((piece.shards, piece.shape) == (local.shards, shape) for piece in stored):
            return _joined(name, key, [piece for piece in stored if piece.shard == local.shard], span)
        shards = []
        for number in range(stored[0].shards):
            pieces = [piece for piece in stored if piece.shard == number]
            shards.append(_joined(name, key, pieces, range(_count(pieces[0].shape))).reshape(pieces[0].shape))
        whole = merge_shards(key, shards)
        if key in (EMBEDDING, OUTPUT):  # padded to a multiple of the tensor-parallel size
            rows = shape[0] * local.shards
            padding = whole.new_zeros(max(0, rows - len(whole)), *whole.shape[1:])
            whole = torch.cat([whole[:rows], padding])
        return shard_of(key, whole, local.shards, local.shard).reshape(-1)[span.start : span.stop]


@contextmanager
def stored_pieces(folder: Path) -> Iterator[StoredPieces]:
    """Open the files of all ranks."""
    with ExitStack() as stack:
        yield StoredPieces(folder, stack)


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _joined(name: str, key: str, pieces: list[_Stored], span: range) -> Tensor:
    """Read a part of one shard from the pieces that it overlaps."""
    ordered = sorted(pieces, key=lambda piece: piece.start)
    parts, reached = [], span.start
    for piece in ordered:
        end = min(piece.start + piece.length, span.stop)
        if piece.start <= reached < end:
            parts.append(piece.file.get_slice(piece.name)[reached - piece.start : end - piece.start])
            reached = end
    if reached != span.stop:
        msg = f"the checkpoint holds {reached - span.start} of {len(span)} numbers of {name} of {key}"
        raise ValueError(msg)
    return torch.cat(parts) if len(parts) > 1 else parts[0]
