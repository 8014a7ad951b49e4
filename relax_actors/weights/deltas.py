"""Lossless deltas between two sets of weights: positions and differences of bit patterns.

A small optimizer step changes few half-precision weights, most of them to a neighbouring number. Each tensor with 16-
or 32-bit elements is encoded as

    <name>:gaps   uint8, number of elements to skip before the next changed one; 255 skips 255 and continues
    <name>:bits   uint8, where that is shorter: one bit per element, set if it changed
    <name>:steps  uint8, two bits per change: bit pattern + 1, - 1, + the next of `small`, + the next of `wide`
    <name>:small  int8, differences of bit patterns
    <name>:wide   int16 or int32, differences that do not fit int8, modulo the width

Tensors of other types, and tensors that this would not make shorter, are stored in full under their names. Unchanged
tensors are left out. Law: `apply(base, encode(base, new)) == new`, bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.errors import StoreError
from relax_actors.weights.files import memory_of

_BITS = {2: torch.int16, 4: torch.int32}
_UP, _DOWN, _SMALL, _WIDE = range(4)
_DIFFERENCES = {_SMALL: "small", _WIDE: "wide"}
PARTS = ("gaps", "bits", "steps", "small", "wide")
_SKIP = 255
_BLOCK = 1 << 20
_SHIFTS = np.array([0, 2, 4, 6], np.uint8)


def encode(base: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the delta from `base` to `new` as CPU tensors; raises ValueError if unlike."""
    if {n: (t.dtype, t.shape) for n, t in base.items()} != {n: (t.dtype, t.shape) for n, t in new.items()}:
        msg = "two sets of weights differ in names, dtypes or shapes; publish a full set"
        raise ValueError(msg)
    delta: dict[str, Tensor] = {}
    for name, tensor in new.items():
        if tensor.element_size() not in _BITS:
            parts, size = None, 0 if torch.equal(_pattern(base[name]), _pattern(tensor)) else tensor.nbytes
        else:
            parts = _encode_tensor(base[name], tensor)
            size = sum(part.nbytes for part in parts.values())
        if size and size >= tensor.nbytes:
            delta[name] = tensor.detach().cpu()
        elif parts:
            delta |= {f"{name}:{part}": torch.from_numpy(array) for part, array in parts.items()}
    return delta


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Total size of tensors in bytes."""
    return sum(tensor.nbytes for tensor in tensors.values())


def apply(tensors: dict[str, Tensor], delta: Mapping[str, Tensor]) -> None:
    """Apply a delta to CPU tensors in place; StoreError leaves undefined contents."""
    try:
        names = {name.partition(":")[0] for name in delta}
        if unknown := names - tensors.keys():
            msg = f"unknown names {sorted(unknown)[:3]}"
            raise ValueError(msg)  # noqa: TRY301 reported below like every other mismatch
        for name in names:
            if name in delta:
                if (delta[name].dtype, delta[name].shape) != (tensors[name].dtype, tensors[name].shape):
                    msg = f"{name} is {delta[name].dtype} {list(delta[name].shape)}"
                    raise ValueError(msg)  # noqa: TRY301
                tensors[name] = delta[name].clone()
            else:
                _apply_to_tensor(
                    tensors[name], {k: delta[f"{name}:{k}"].numpy() for k in PARTS if f"{name}:{k}" in delta}
                )
    except (ValueError, IndexError, KeyError, TypeError) as error:
        msg = f"a delta does not fit the weights it is applied to: {error}"
        raise StoreError(msg) from error


def advanced(base: Mapping[str, Tensor], chain: Sequence[Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `base` with deltas applied one after the other; only the tensor in work is copied.

    Raises:
        StoreError: a delta does not fit.
    """
    changes: list[defaultdict[str, dict[str, Tensor]]] = []
    for delta in chain:
        changes.append(defaultdict(dict))
        for name, part in delta.items():
            changes[-1][name.partition(":")[0]][name] = part
        if unknown := changes[-1].keys() - base.keys():
            apply({}, {name: torch.empty(0) for name in unknown})  # raises the error that names them
    for name, tensor in base.items():
        own = {name: tensor}
        for delta in (change[name] for change in changes if name in change):
            if own[name] is tensor:
                own = {name: tensor.clone()}
            apply(own, delta)
        yield name, own[name]


def _pattern(tensor: Tensor) -> Tensor:
    """Return the elements' bit patterns as a flat view."""
    flat = tensor.detach().reshape(-1)
    return flat.view(_BITS.get(tensor.element_size(), torch.uint8))


def _changes(old: Tensor, new: Tensor) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
    """Yield positions and differences of changed patterns, in order.

    CPU tensors are compared in blocks that fit the caches.
    """
    if old.device.type != "cpu":
        changed = (old != new).nonzero()[:, 0]
        yield changed.cpu().numpy(), (new[changed] - old[changed]).cpu().numpy()
        return
    before, after = (np.frombuffer(memory_of(t), str(t.dtype).removeprefix("torch.")) for t in (old, new))
    for start in range(0, len(after), _BLOCK):
        old_block, new_block = before[start : start + _BLOCK], after[start : start + _BLOCK]
        positions = np.flatnonzero(old_block != new_block)
        yield positions + start, new_block[positions] - old_block[positions]


def _encode_tensor(base: Tensor, new: Tensor) -> dict[str, NDArray[Any]]:
    old, current = _pattern(base), _pattern(new)
    changed_at: list[NDArray[np.int64]] = []
    gaps: list[NDArray[np.uint8]] = []
    codes: list[NDArray[np.uint8]] = []
    lists: dict[str, list[NDArray[Any]]] = {"small": [], "wide": []}
    last = -1
    for positions, difference in _changes(old, current):
        if len(positions):
            changed_at.append(positions)
            gaps.append(_encode_gaps(positions, last))
            last = int(positions[-1])
            codes.append(_step_codes(difference))
            for code, name in _DIFFERENCES.items():
                lists[name].append(difference[np.flatnonzero(codes[-1] == code)])
    if not changed_at:
        return {}
    where: dict[str, NDArray[Any]] = {"gaps": np.concatenate(gaps)}
    if len(where["gaps"]) > len(current) / 8:
        changed = np.zeros(len(current), np.bool_)
        changed[np.concatenate(changed_at)] = True
        where = {"bits": np.packbits(changed)}
    arrays = {name: np.concatenate(parts) for name, parts in lists.items()}
    arrays["small"] = arrays["small"].astype(np.int8)
    steps = {"steps": _pack(np.concatenate(codes))}
    return where | steps | {name: array for name, array in arrays.items() if len(array)}


def _step_codes(difference: NDArray[Any]) -> NDArray[np.uint8]:
    codes = np.full(len(difference), _WIDE, np.uint8)
    codes[difference == difference.astype(np.int8)] = _SMALL
    codes[difference == 1] = _UP
    codes[difference == -1] = _DOWN
    return codes


def _apply_to_tensor(tensor: Tensor, parts: dict[str, NDArray[Any]]) -> None:
    pattern = tensor.view(-1).view(_BITS[tensor.element_size()]).numpy()
    if "gaps" in parts:
        positions = _decode_gaps(parts["gaps"])
    else:
        positions = np.flatnonzero(np.unpackbits(parts["bits"], count=len(pattern)))
    codes = _unpack(parts["steps"], len(positions))
    difference = np.empty(len(positions), pattern.dtype)
    difference[codes == _UP] = 1
    difference[codes == _DOWN] = -1
    for code, name in _DIFFERENCES.items():
        difference[np.flatnonzero(codes == code)] = parts.get(name, np.zeros(0, pattern.dtype))
    pattern[positions] += difference


def _encode_gaps(positions: NDArray[np.int64], last: int) -> NDArray[np.uint8]:
    """Encode positions as gaps; `last` is the changed position before them."""
    gaps = np.empty_like(positions)
    gaps[0] = positions[0] - last - 1
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps[1:] -= 1
    if gaps.max() < _SKIP:
        return gaps.astype(np.uint8)
    skips = gaps // _SKIP
    out = np.full(len(gaps) + int(skips.sum()), _SKIP, np.uint8)
    out[np.arange(len(gaps)) + np.cumsum(skips)] = gaps % _SKIP
    return out


def _decode_gaps(gaps: NDArray[np.uint8]) -> NDArray[np.int64]:
    ends: NDArray[np.int64] = np.cumsum(np.where(gaps == _SKIP, _SKIP, gaps.astype(np.int64) + 1))
    positions: NDArray[np.int64] = ends[gaps != _SKIP] - 1
    return positions


def _pack(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    padded = np.pad(codes, (0, -len(codes) % 4)).reshape(-1, 4)
    packed: NDArray[np.uint8] = np.bitwise_or.reduce(padded << _SHIFTS, axis=1)
    return packed


def _unpack(packed: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    codes: NDArray[np.uint8] = ((packed[:, None] >> _SHIFTS) & np.uint8(3)).reshape(-1)
    if codes.size < count:
        msg = f"{packed.size} bytes of steps for {count} changes"
        raise ValueError(msg)
    return codes[:count]
