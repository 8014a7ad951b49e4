"""MurmurHash3 (32 bits), from which SGLang derives the random numbers of seeded requests.

Gives the same numbers as the GPU kernel (sglang/kernels/ops/sampling/murmur_hash.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def _mix(h: Tensor, k: Tensor) -> Tensor:
    k = _rotate((k * 0xCC9E2D51) & MASK, 15)
    h = _rotate(h ^ ((k * 0x1B873593) & MASK), 13)
    return (h * 5 + 0xE6546B64) & MASK


def _rotate(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & MASK


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Return the hash, `[rows, columns] uint32`.

    Arguments are `seed [rows] uint64`, `positions [rows]` and `columns [columns]`.
    """
    # int64 products may overflow, but their low 32 bits are exact.
    seeds, masked = seed.view(torch.int64), positions.to(torch.int64) & MASK
    h = torch.zeros_like(seeds)
    for block in (seeds & MASK, (seeds >> 32) & MASK, masked):
        h = _mix(h, block)
    h = _mix(h[:, None], columns.to(torch.int64)[None, :] & MASK) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK
    return (h ^ (h >> 16)).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")


def define() -> None:
    """Register the hash as the torch operator that SGLang calls on a CPU."""
    if not hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        _library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
        _library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
