"""Files of a sharded checkpoint: safetensors and msgpack, written by each rank for itself, readable by any layout.

megatron-core says which part of which whole tensor a rank holds (`ShardedTensor`). Its own writer and reader exchange
and store pickles, so they are not used.

`rank.<n>.safetensors` holds the parts of a rank, `rank.<n>.json` their positions in the whole tensors, and
`common.msgpack` the state that is the same on all ranks, written by rank 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch import Tensor

from relax_actors.engines.ranks import wire
from relax_actors.weights import files as weights

COMMON = "common.msgpack"
_TENSOR = "__tensor__"


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a whole tensor: `file` holds it as `name`, at `offset`, with `shape`."""

    file: Any
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def writer(sharded: dict[str, Any], rank: int) -> Callable[[Path], None]:
    """Copy the parts of this rank; return a function that writes them to a folder, in any thread.

    Args:
        sharded: sharded state dict of this rank; changed in place.
        rank: number of this process.
    """
    parts, common = save_preprocess(sharded, validate_access_integrity=False)
    owned = [part for part in _tensors(parts) if is_main_replica(part.replica_id)]
    copied = {str(i): _whole_axes(part).to("cpu", copy=True).contiguous() for i, part in enumerate(owned)}
    index = [{"key": part.key, "offset": list(part.global_offset)} for part in owned]
    plain = wire.encode(_map(common, _pack)) if rank == 0 else b""

    def write(folder: Path) -> None:
        weights.save(copied, folder / f"rank.{rank}.safetensors")
        (folder / f"rank.{rank}.json").write_text(json.dumps(index))
        if rank == 0:
            (folder / COMMON).write_bytes(plain)

    return write


def read(sharded: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read what `writer` wrote under any layout, as a state dict with this rank's parts.

    Args:
        sharded: sharded state dict of this rank, whose tensors say which parts to read.
        folder: folder with the files of all ranks.

    Raises:
        ValueError: a tensor is not in the checkpoint, or not all of it.
    """
    state: dict[str, Any] = _map(wire.decode((folder / COMMON).read_bytes()), _unpack)
    wanted, nonpersistent, factories = load_preprocess(sharded)
    merge(state, nonpersistent)
    parts, _ = extract_sharded_base(wanted)
    with ExitStack() as stack:
        stored = _stored(folder, stack)
        dict_list_map_inplace(lambda part: _assembled(part, stored) if isinstance(part, ShardedTensor) else None, parts)
    merge(state, parts)
    found: dict[str, Any] = apply_factory_merges(state, factories)
    return found


def _tensors(parts: dict[str, Any]) -> Iterator[ShardedTensor]:
    """Sharded tensors; layers also have an `_extra_state`, which is None but for number formats that are not used."""
    for part in nested_values(parts):
        if isinstance(part, ShardedTensor):
            yield part
        elif part.data is not None:
            msg = f"{part.key} of the model's state is a {type(part.data).__name__}; only tensors can be saved"
            raise TypeError(msg)


def _whole_axes(part: ShardedTensor) -> Tensor:
    """Tensor with all axes of the whole one."""
    assert part.data is not None  # noqa: S101 only a plan to read lacks data
    found: Tensor = part.data.detach().reshape(_shape(part))
    return found


def _shape(part: ShardedTensor) -> tuple[int, ...]:
    return (*[1] * part.prepend_axis_num, *part.local_shape)


def _stored(folder: Path, stack: ExitStack) -> dict[str, list[_Part]]:
    """Parts in the files of all ranks, by key."""
    found: dict[str, list[_Part]] = {}
    for path in sorted(folder.glob("rank.*.safetensors")):
        file = stack.enter_context(safetensors.safe_open(path, framework="pt"))
        for name, entry in enumerate(json.loads(path.with_suffix(".json").read_text())):
            shape = tuple(file.get_slice(str(name)).get_shape())
            found.setdefault(entry["key"], []).append(_Part(file, str(name), tuple(entry["offset"]), shape))
    return found


def _assembled(wanted: ShardedTensor, stored: dict[str, list[_Part]]) -> Tensor:
    """Copy a part from the stored parts that it overlaps.

    A tensor whose padding depends on the layout may be partly missing; the missing part is 0.
    """
    shape, offset = _shape(wanted), tuple(wanted.global_offset)
    out, copied = torch.zeros(shape, dtype=wanted.dtype), 0
    for part in stored.get(wanted.key, ()):
        bounds = list(_overlap(offset, shape, part))
        if all(low < high for low, high in bounds):
            source = tuple(slice(a - b, z - b) for (a, z), b in zip(bounds, part.offset, strict=True))
            target = tuple(slice(a - b, z - b) for (a, z), b in zip(bounds, offset, strict=True))
            found = part.file.get_slice(part.name)[source] if source else part.file.get_tensor(part.name)
            out[target] = found
            copied += found.numel()
    if copied != out.numel() and not (copied and wanted.allow_shape_mismatch):
        msg = f"the checkpoint holds {copied} of {out.numel()} numbers of {wanted.key} at {list(offset)}"
        raise ValueError(msg)
    out = out.reshape(tuple(wanted.local_shape))
    return out if wanted.data is None else out.to(wanted.data.device)


def _overlap(offset: tuple[int, ...], shape: tuple[int, ...], part: _Part) -> Iterator[tuple[int, int]]:
    for begin, size, other, length in zip(offset, shape, part.offset, part.shape, strict=True):
        yield max(begin, other), min(begin + size, other + length)


def _map(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to a tree of dicts and lists, to the leaves first."""
    if isinstance(tree, dict):
        return change({key: _map(value, change) for key, value in tree.items()})
    if isinstance(tree, list | tuple):
        return [_map(value, change) for value in tree]
    return change(tree)


def _pack(value: Any) -> Any:
    return {_TENSOR: value.detach().cpu().numpy()} if isinstance(value, Tensor) else value


def _unpack(value: Any) -> Any:
    return torch.from_numpy(np.array(value[_TENSOR])) if isinstance(value, dict) and _TENSOR in value else value
