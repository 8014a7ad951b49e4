"""Value loss of a critic, against numbers worked by hand."""

from __future__ import annotations

import pytest
import torch

from relax_actors.algorithms.evaluate.kinds import evaluate
from relax_actors.algorithms.losses import add_metrics
from relax_actors.algorithms.values import measure_values, value_loss, value_metrics
from tests.support.messages import assert_says

MASK = torch.tensor([[True, True, True, False]])


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def test_the_loss_is_half_of_the_larger_squared_error() -> None:
    values, old, returns = row(1.0, 0.5, 0.0, 9.0).requires_grad_(), row(0.0, 0.4, 0.0, 0.0), row(2.0, 0.0, 1.0, 0.0)
    found = value_loss(values, old, returns, clip=0.2)
    # The first value moved by 1, of which 0.2 count: (0.2 - 2)^2 / 2 against (1 - 2)^2 / 2.
    torch.testing.assert_close(found.loss[0, :3], torch.tensor([1.62, 0.125, 0.5], dtype=torch.float64))
    assert found.clipped[0, :3].tolist() == [True, False, False]
    found.loss.masked_fill(~MASK, 0.0).sum().backward()
    torch.testing.assert_close(values.grad, row(0.0, 0.5, -1.0, 0.0))


def test_a_value_that_stays_in_the_clip_range_is_not_counted_as_clipped() -> None:
    random = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 1, 200, generator=random)
    found = value_loss(values / 1000, old / 10, returns, clip=1.0)
    assert not found.clipped.any()


def test_without_clipping_the_loss_is_half_of_the_squared_error() -> None:
    found = value_loss(row(1.0), row(-5.0), row(3.0), clip=0.0)
    assert found.loss.item() == 2.0
    assert not found.clipped.any()
    with pytest.raises(ValueError, match="clip is -1; use a distance of at least 0"):
        value_loss(row(1.0), row(1.0), row(1.0), clip=-1)


@pytest.mark.parametrize("parts", [1, 3])
def test_metrics_do_not_depend_on_the_cut_into_micro_batches(parts: int) -> None:
    values, returns = row(1.0, 2.0, 3.0), row(1.0, 3.0, 8.0)
    loss = value_loss(values, values, returns, clip=0.2)
    measured = []
    for n in range(parts):
        mask = torch.tensor([[parts == 1 or n == k for k in range(3)]])
        measured.append(measure_values(values, returns, loss, mask))
    found = value_metrics(add_metrics(measured) | {"grad_norm": 2.0})
    # Errors 0, 1, 5 have variance 42/9; returns 1, 3, 8 have variance 78/9.
    expected = {"tokens": 3.0, "value": 2.0, "return": 4.0, "value_loss": 13 / 3, "value_clipped": 0.0}
    assert found == pytest.approx({**expected, "explained_variance": 1 - 42 / 78, "grad_norm": 2.0})


def test_the_evaluate_command_gives_loss_and_gradient_of_ragged_values() -> None:
    inputs = {"values": [[1.0, 0.5], []], "old_values": [[0.0, 0.4], []], "returns": [[2.0, 0.0], []]}
    (found, plain, wrong) = evaluate(
        [
            {"kind": "value_loss", "name": "clip", "settings": {"clip": 0.2}, "inputs": inputs},
            {"kind": "value_loss", "name": "clip", "settings": {"clip": 0}, "inputs": inputs},
            {"kind": "value_loss", "name": "huber", "inputs": inputs},
        ]
    )
    assert found["outputs"]["loss"] == pytest.approx((1.62 + 0.125) / 2)
    assert found["outputs"]["per_token"] == [pytest.approx([1.62, 0.125]), []]
    assert found["outputs"]["clipped"] == [[1, 0], []]
    assert found["gradients"]["values"] == [[0.0, 0.25], []]
    assert plain["gradients"]["values"] == [[-0.5, 0.25], []]
    assert_says(wrong["error"], "name = 'huber'", "clip")


def test_equal_returns_have_no_variance_to_explain() -> None:
    values, returns = row(0.0, 1.0), row(0.7, 0.7)
    measured = measure_values(
        values, returns, value_loss(values, values, returns, clip=0), torch.tensor([[True, True]])
    )
    assert value_metrics(measured)["explained_variance"] == 0
