"""Fractions of rotary positions in SGLang, which carries positions as int64 and looks their angles up in a table.

Videos of Qwen3-Omni have positions between whole numbers. The fraction travels in the upper half of a position, so that
SGLang's own arithmetic (the next token's position is one more) leaves it as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SHIFT = 32
UNITS = 1 << 20
"""Smallest fraction: 1 / UNITS turns the fastest angle by less than the rounding of float32."""


def pack(positions: Tensor) -> Tensor:
    """Return positions of any dtype as int64 with their fractions."""
    whole = positions.double().floor()
    fraction = ((positions.double() - whole) * UNITS).round().long()
    return whole.long() + (fraction << SHIFT)


def unpack(positions: Tensor) -> Tensor:
    """Return the float64 positions that `pack` was given."""
    return (positions & ((1 << SHIFT) - 1)).double() + (positions >> SHIFT).double() / UNITS


def read_fractions(model: nn.Module) -> None:
    """Make the rotary embeddings of a model compute the angles of positions with fractions."""
    for module in model.modules():
        if "cos_sin_cache" in dict(module.named_buffers(recurse=False)) and getattr(module, "mrope_section", None):
            module.forward = _Rotary(module)


class _Rotary:
    """Rotary embedding that computes its angles instead of looking them up."""

    def __init__(self, module: Any) -> None:
        self._native = type(module).forward_native
        self._module = module
        self._inverse: Tensor = module._compute_inv_freq(module.base).float()  # noqa: SLF001 that of its table

    def __call__(self, positions: Tensor, query: Tensor, key: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Rotate `query` and `key`, `[tokens, heads * size]`, at `positions`, `[tokens]` or `[3, tokens]`."""
        self._inverse = self._inverse.to(query.device)
        angles = unpack(positions)[..., None].float() * self._inverse
        stand_in = _Table(torch.cat((angles.cos(), angles.sin()), -1).to(query.dtype), self._module)
        rotated: tuple[Tensor, Tensor] = self._native(stand_in, positions, query, key)
        return rotated


class _Table:
    """A rotary embedding with the angles of one batch, whatever position they are asked for.

    `angles` are cosines and sines, `[..., tokens, size]`; `module` has all other attributes.
    """

    def __init__(self, angles: Tensor, module: Any) -> None:
        self._angles, self._module = angles, module

    @property
    def cos_sin_cache(self) -> _Table:
        """The table itself."""
        return self

    def __getitem__(self, _: Tensor) -> Tensor:
        return self._angles

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
