"""Entropy over the vocabulary: equal to its definition, chunk by chunk, without a second tensor of the logits' size."""

from __future__ import annotations

from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor

from relax_actors.algorithms import entropy
from relax_actors.algorithms.entropy import Shards, logprobs_and_entropies
from relax_actors.algorithms.losses import token_logprobs


def drawn(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Return logits with a -inf, float64, and targets that avoid it."""
    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(*shape, generator=random, dtype=torch.float64)
    logits[..., -1] = float("-inf")
    return logits, torch.randint(0, shape[-1] - 1, shape[:-1], generator=random)


def by_definition(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, targets[..., None])[..., 0], -(logp.exp() * logp.clamp(min=-1e9)).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_entropies_and_gradients_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    monkeypatch.setattr(entropy, "CHUNK_ELEMENTS", 3 * 11)  # several chunks, the last one smaller
    logits, targets = drawn(0, 2, 5, 11)
    weights = torch.randn(2, 2, 5, dtype=torch.float64)
    gradients = []
    for function in (logprobs_and_entropies, by_definition):
        leaf = logits.clone().requires_grad_()
        logprobs, entropies = function(leaf, targets, temperature)
        gradients += torch.autograd.grad((weights[0] * logprobs + weights[1] * entropies).sum(), leaf)
        gradients += [logprobs.detach(), entropies.detach()]
    torch.testing.assert_close(gradients[:3], gradients[3:], rtol=1e-12, atol=1e-12)


def test_gradient_equals_finite_differences() -> None:
    logits, targets = drawn(1, 3, 7)
    assert torch.autograd.gradcheck(
        lambda z: logprobs_and_entropies(z, targets, 0.9), logits[..., :-1].clone().requires_grad_()
    )


def test_half_precision_logits_are_computed_in_float32() -> None:
    logits, targets = drawn(2, 4, 9)
    half = logits.bfloat16()
    logprobs, entropies = logprobs_and_entropies(half, targets, 1.0)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs, token_logprobs(half, targets, 1.0))
    torch.testing.assert_close(entropies, by_definition(half.float(), targets, 1.0)[1])


def test_forward_and_backward_hold_one_tensor_of_the_size_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entropy, "CHUNK_ELEMENTS", 1000)
    logits, targets = drawn(3, 64, 500)
    leaf = logits.float().requires_grad_()
    own, large = leaf.untyped_storage(), set()

    class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), settings=None):  # noqa: ANN001, ANN204
            found = function(*arguments, **(settings or {}))
            for tensor in found if isinstance(found, tuple | list) else (found,):
                storage = tensor.untyped_storage()
                if storage.nbytes() >= own.nbytes() and storage.data_ptr() != own.data_ptr():
                    large.add(storage.data_ptr())
            return found

    with Allocations():
        logprobs, entropies = logprobs_and_entropies(leaf, targets, 1.0)
        assert not large
        torch.autograd.grad((logprobs + entropies).sum(), leaf)
    assert len(large) == 1  # the gradient


class OfThreads(Shards):
    """Reductions over threads that hold parts of the vocabulary, in place of ranks."""

    def __init__(
        self, rank: int, columns: int, width: int | None, shared: list[Tensor | None], barrier: Barrier
    ) -> None:
        self.first, self.width, self._rank = rank * columns, width, rank
        self._shared, self._barrier = shared, barrier

    def _gathered(self, tensor: Tensor) -> Tensor:
        self._shared[self._rank] = tensor.clone()
        self._barrier.wait(30)
        found = torch.stack([part for part in self._shared if part is not None])
        self._barrier.wait(30)
        return found

    def max(self, tensor: Tensor) -> Tensor:
        return self._gathered(tensor).max(0).values

    def sum(self, tensor: Tensor) -> Tensor:
        return self._gathered(tensor).sum(0)


def test_shards_of_the_vocabulary_give_the_numbers_of_the_whole() -> None:
    columns = 5
    logits, targets = drawn(4, 6, 8)  # 8 tokens in two shards of 5 columns: the last two are padding
    weights = torch.randn(2, 6, dtype=torch.float64)
    padded = torch.cat([logits, torch.full((6, 2), 99.0, dtype=torch.float64)], -1)
    whole = logits.clone().requires_grad_()
    expected = logprobs_and_entropies(whole, targets, 0.8)
    (gradient,) = torch.autograd.grad((weights[0] * expected[0] + weights[1] * expected[1]).sum(), whole)
    shared, barrier, parts = [None, None], Barrier(2), {}

    def run(rank: int) -> None:
        own = padded[:, rank * columns : (rank + 1) * columns].clone().requires_grad_()
        shards = OfThreads(rank, columns, 3 if rank else None, shared, barrier)
        found = logprobs_and_entropies(own, targets, 0.8, shards)
        (of_own,) = torch.autograd.grad((weights[0] * found[0] + weights[1] * found[1]).sum(), own)
        parts[rank] = *(t.detach() for t in found), of_own

    threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in range(2):
        torch.testing.assert_close(parts[rank][:2], tuple(t.detach() for t in expected), rtol=1e-12, atol=1e-12)
    joined = torch.cat([parts[0][2], parts[1][2]], -1)
    torch.testing.assert_close(joined[:, :8], gradient, rtol=1e-12, atol=1e-12)
    assert not joined[:, 8:].any()


def test_temperature_of_zero_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"temperature is 0; score greedy samples at the training temperature, such as 1"
    ):
        logprobs_and_entropies(*drawn(0, 2, 4), 0)
