"""Weights in float8 with a scale for each block of 128 x 128, the form of FP8 checkpoints.

For a block w: s = max|w| / 448, and Q(w) = s * e4m3(w / s), where e4m3 rounds to the nearest number of this form of
float8, whose largest is 448 (DeepSeek-V3, arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from relax_actors.engines.sglang.quantization import BLOCK

TINY = 1e-12
"""Smallest scale: a block of zeros needs one, too."""
AT_ONCE = 1 << 23
"""Numbers quantised at a time, for which copies in float32 are made: a server has given most of its GPU away."""


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight in float8, and the scales of its blocks.

    Args:
        weight: `[rows, columns]` of any float dtype.

    Returns:
        values `[rows, columns] float8_e4m3fn`, and scales `[ceil(rows / 128), ceil(columns / 128)] float32`.
    """
    rows, columns = weight.shape
    values = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty((-(-rows // BLOCK), -(-columns // BLOCK)), device=weight.device)
    stripe = max(1, AT_ONCE // (BLOCK * columns))
    for first in range(0, len(scales), stripe):
        part = slice(first * BLOCK, (first + stripe) * BLOCK)
        values[part], scales[first : first + stripe] = _quantised(weight[part])
    return values, scales


def _quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    wide, missing = weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK)
    wide = pad(wide, missing) if any(missing) else wide
    blocks = wide.reshape(wide.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scales = (blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max).clamp_min(TINY)
    values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.view(wide.shape)[:rows, :columns], scales


def dequantised(values: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers that values and scales of `quantised` express, `[rows, columns] float32`."""
    rows, columns = values.shape
    each = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return values.float() * each
