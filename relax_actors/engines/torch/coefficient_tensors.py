"""Coefficients that adapt from step to step as tensors of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from relax_actors.algorithms.controllers import Coefficients

FILE = "coefficients.safetensors"


def to_tensors(coefficients: Coefficients) -> dict[str, Tensor]:
    """Return the coefficients of the next step as float64 scalars, with every bit."""
    last = math.nan if coefficients.last_entropy is None else coefficients.last_entropy
    values = {"kl": coefficients.kl, "entropy": coefficients.entropy, "last_entropy": last}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def from_tensors(tensors: Mapping[str, Tensor]) -> Coefficients:
    """Return what `to_tensors` encoded."""
    kl, entropy, last = (float(tensors[name]) for name in ("kl", "entropy", "last_entropy"))
    return Coefficients(kl, entropy, None if math.isnan(last) else last)
