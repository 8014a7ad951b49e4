"""Training engines of tests: started from one seed, and compared by their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from relax_actors.weights import files as weights


def started(engine: Any) -> Any:
    """Draw the weights of an engine and finish its warm start."""
    engine.initialise(5)
    engine.finish_warm_start()
    return engine


def weights_of(engine: Any, path: Path) -> dict[str, torch.Tensor]:
    """Publish the weights of an engine and read them back."""
    engine.publish(path)
    return weights.load([path])


def max_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference of two sets of weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
