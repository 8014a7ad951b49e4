"""The backward pass of a kernel is strictly deterministic in a deterministic run, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from relax_actors.engines.torch.strict_backward import strict_backward

SEEN: list[tuple[str, bool]] = []


class Watched(torch.autograd.Function):
    """Twice its input; notes whether torch is strict in its backward pass."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, name: str) -> Tensor:
        context.name = name
        return 2 * tensor

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        SEEN.append((context.name, not torch.is_deterministic_algorithms_warn_only_enabled()))
        return 2 * gradients[0], None


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    SEEN.clear()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return Watched.apply(functional.scaled_dot_product_attention(query, key, value), "kernel")


def layer(tensor: Tensor) -> Tensor:
    inside = Watched.apply(tensor, "before")
    return Watched.apply(inside + strict_backward(attend, inside, inside.sin(), inside.cos()), "after")


@pytest.mark.parametrize("passes", ["once", "recomputed"])
def test_only_the_kernel_is_strict_and_gradients_are_the_same(passes: str) -> None:
    given = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    found = layer(given) if passes == "once" else checkpoint(layer, given, use_reentrant=False)
    layer(found).square().sum().backward()
    assert SEEN == 2 * [("after", False), ("kernel", True), ("before", False)]
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    ours, given.grad = given.grad, None
    assert ours is not None
    torch.use_deterministic_algorithms(False)
    layer(layer(given)).square().sum().backward()
    assert given.grad is not None
    assert torch.equal(given.grad, ours)


def test_without_a_deterministic_run_nothing_is_wrapped() -> None:
    torch.use_deterministic_algorithms(False)
    given = torch.randn(2, 3, 5, 8, requires_grad=True)
    strict_backward(attend, given, given, given).sum().backward()
    assert SEEN == [("kernel", True)]  # torch calls it strict where nothing is deterministic
    assert not torch.are_deterministic_algorithms_enabled()
