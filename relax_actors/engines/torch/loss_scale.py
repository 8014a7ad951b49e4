"""Dynamic loss scale: in float16 small gradients become 0, unless the loss is multiplied before the backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from relax_actors.config.training import TrainerSection

SMALLEST = 2.0**-20
"""Smallest loss scale. Losses are sums over a step, so that gradients may overflow with a scale of 1, too."""


@dataclass(slots=True)
class LossScale:
    """Factor of the loss, which follows the overflows of its gradients; part of the optimizer's state.

    Attributes:
        value: the factor.
        growth_interval: updates without overflow after which it is doubled; 0 for a constant factor.
        updates: updates since it changed.
    """

    value: float = 1.0
    growth_interval: int = 0
    updates: int = 0

    @classmethod
    def of(cls, trainer: TrainerSection) -> LossScale:
        """Return the scale of a new optimizer: constant 1, unless the precision is float16."""
        settings = trainer.loss_scale
        return cls(settings.initial, settings.growth_interval) if trainer.precision == "float16" else cls()

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to run the backward pass of."""
        return loss if self.value == 1.0 else loss * self.value

    def metrics_of(self, norm: float, measured: Iterable[float]) -> dict[str, float]:
        """Return the metrics of an update, and adapt the scale for the next one.

        If they lack `grad_norm`, the gradients overflowed because of the scale, and the update is to be skipped.

        Args:
            norm: norm of the gradients, without the scale.
            measured: measurements of the forward passes.

        Raises:
            FloatingPointError: the norm is not finite, and would not be with a smaller scale.
        """
        scale, overflowed = self.value, not math.isfinite(norm)
        is_smallest = not self.growth_interval or scale <= SMALLEST
        if overflowed and (is_smallest or not all(map(math.isfinite, measured))):
            msg = f"the gradient norm is {norm}"
            raise FloatingPointError(msg)
        self.updates = 0 if overflowed else self.updates + 1
        if overflowed:
            self.value = max(SMALLEST, scale / 2)
        elif self.updates == self.growth_interval:
            self.value, self.updates = 2 * scale, 0
        of_scale = {"loss_scale": scale, "skipped_updates": float(overflowed)} if self.growth_interval else {}
        return of_scale if overflowed else {"grad_norm": norm} | of_scale
