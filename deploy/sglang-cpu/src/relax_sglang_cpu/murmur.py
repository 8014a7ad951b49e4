"""MurmurHash3 (32 bits) of seed, position and column: the random numbers of requests with a seed, as SGLang's own
kernels for GPUs make them (sglang/kernels/ops/sampling/murmur_hash.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def _mixed(h: Tensor, k: Tensor) -> Tensor:
    k = _rotated((k * 0xCC9E2D51) & MASK, 15)
    h = _rotated(h ^ ((k * 0x1B873593) & MASK), 13)
    return (h * 5 + 0xE6546B64) & MASK


def _rotated(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & MASK


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """`[rows, columns] uint32` from `seed [rows] uint64`, `positions [rows]` and `columns [columns]`."""
    # In int64, whose products keep their low 32 bits.
    seeds, places = seed.view(torch.int64), positions.to(torch.int64) & MASK
    h = torch.zeros_like(seeds)
    for block in (seeds & MASK, (seeds >> 32) & MASK, places):
        h = _mixed(h, block)
    h = _mixed(h[:, None], columns.to(torch.int64)[None, :] & MASK) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK
    return (h ^ (h >> 16)).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")


def define() -> None:
    """Let SGLang find it under the name that it calls it by on a CPU."""
    if not hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        _library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
        _library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
