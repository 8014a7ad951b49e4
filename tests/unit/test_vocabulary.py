"""Scores of tokens over the vocabulary: equal to their definition, chunk by chunk, without a tensor of all logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from relax_actors.algorithms import vocabulary
from relax_actors.algorithms.vocabulary import Head, Shards, score_tokens, score_top, squared_probabilities


def drawn(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Return logits with a -inf, float64, and targets that avoid it."""
    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(*shape, generator=random, dtype=torch.float64)
    logits[..., -1] = float("-inf")
    return logits, torch.randint(0, shape[-1] - 1, shape[:-1], generator=random)


def drawn_head(seed: int, width: int, vocab: int, dtype: torch.dtype = torch.float64, **settings: Any) -> Head:
    random = torch.Generator().manual_seed(seed)
    weight, bias = (torch.randn(*shape, generator=random, dtype=dtype) for shape in ((vocab, width), (vocab,)))
    return Head(weight.requires_grad_(), bias.requires_grad_(), **settings)


def scored(hidden: Tensor, targets: Tensor, temperature: float, **settings: Any) -> tuple[Tensor, Tensor]:
    found = score_tokens(hidden, targets[..., None], temperature, entropies=True, **settings)
    assert found.entropies is not None
    return found.logprobs[..., 0], found.entropies


def by_definition(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, targets[..., None])[..., 0], -(logp.exp() * logp.clamp(min=-1e9)).sum(-1)


def logits_of(head: Head, hidden: Tensor) -> Tensor:
    logits = hidden @ head.weight.T * head.scale
    if head.bias is not None:
        logits = logits + head.bias * head.scale
    if head.softcap is not None:
        logits = head.softcap * (logits / head.softcap).tanh()
    if head.barred is not None:
        logits = logits.index_fill(-1, head.barred, float("-inf"))
    return logits


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_entropies_and_gradients_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 3 * 11)  # several chunks, the last one smaller
    logits, targets = drawn(0, 2, 5, 11)
    weights = torch.randn(2, 2, 5, dtype=torch.float64)
    gradients = []
    for function in (scored, by_definition):
        leaf = logits.clone().requires_grad_()
        logprobs, entropies = function(leaf, targets, temperature)
        gradients += torch.autograd.grad((weights[0] * logprobs + weights[1] * entropies).sum(), leaf)
        gradients += [logprobs.detach(), entropies.detach()]
    torch.testing.assert_close(gradients[:3], gradients[3:], rtol=1e-12, atol=1e-12)


FORMS = [
    {},
    {"scale": 0.3},
    {"softcap": 2.0},
    {"softcap": 2.0, "scale": 0.5, "barred": torch.tensor([2, 7])},
]


@pytest.mark.parametrize("chunk", [4 * 13, 1 << 26])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entropies", [True, False])
def test_scores_from_hidden_states_and_all_gradients_are_those_of_the_logits(
    monkeypatch: pytest.MonkeyPatch, chunk: int, form: dict[str, Any], *, entropies: bool
) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", chunk)
    head = drawn_head(5, 6, 13, **form)
    random = torch.Generator().manual_seed(6)
    hidden = torch.randn(10, 6, generator=random, dtype=torch.float64).requires_grad_()
    allowed = torch.tensor([i for i in range(13) if i not in (2, 7)])
    ids = allowed[torch.randint(0, 11, (10, 3), generator=random)]
    weights = torch.randn(10, 4, generator=random, dtype=torch.float64)
    leaves = [hidden, head.weight, head.bias]

    def results(found: Tensor, of_vocabulary: Tensor | None) -> list[Tensor]:
        loss = (weights[:, :3] * found).sum()
        if of_vocabulary is not None:
            loss = loss + (weights[:, 3] * of_vocabulary).sum()
        outputs = [found] if of_vocabulary is None else [found, of_vocabulary]
        return [*torch.autograd.grad(loss, leaves), *(t.detach() for t in outputs)]

    scores = score_tokens(hidden, ids, 0.8, head=head, entropies=entropies)
    logp = (logits_of(head, hidden) / 0.8).log_softmax(-1)
    expected = -(logp.exp() * logp.clamp(min=-1e9)).sum(-1) if entropies else None
    torch.testing.assert_close(
        results(scores.logprobs, scores.entropies), results(logp.gather(-1, ids), expected), rtol=1e-10, atol=1e-12
    )


def test_most_likely_tokens_and_squared_probabilities_are_those_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 4 * 13)
    head, targets = drawn_head(7, 6, 13, softcap=3.0), drawn(8, 10, 13)[1]
    hidden = torch.randn(10, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    logp = (logits_of(head, hidden) / 0.8).log_softmax(-1).detach()
    of_targets, ids, top = score_top(hidden, targets, 4, 0.8, head=head)
    torch.testing.assert_close(of_targets, logp.gather(-1, targets[:, None])[:, 0])
    torch.testing.assert_close((top, ids), tuple(logp.topk(4, -1)))
    torch.testing.assert_close(squared_probabilities(hidden, 0.8, head=head), logp.exp().square().sum(-1))


def test_float32_chunks_equal_all_logits_at_once_to_rounding_and_repeat_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, targets = drawn_head(10, 16, 301, torch.float32), drawn(11, 50, 301)[1]
    hidden = torch.randn(50, 16, generator=torch.Generator().manual_seed(12)).requires_grad_()

    def results(chunk: int) -> list[Tensor]:
        monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", chunk)
        logprobs, entropies = scored(hidden, targets, 1.0, head=head)
        gradients = torch.autograd.grad((logprobs + entropies).mean(), [hidden, head.weight, head.bias])
        return [logprobs.detach(), entropies.detach(), *gradients]

    whole, chunked = results(1 << 26), results(7 * 301)
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(*pair) for pair in zip(chunked, results(7 * 301), strict=True))


def test_gradient_equals_finite_differences() -> None:
    logits, targets = drawn(1, 3, 7)
    assert torch.autograd.gradcheck(lambda z: scored(z, targets, 0.9), logits[..., :-1].clone().requires_grad_())


def test_half_precision_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = drawn(2, 4, 9)
    half = logits.bfloat16()
    logprobs, entropies = scored(half, targets, 1.0)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close((logprobs, entropies), by_definition(half.float(), targets, 1.0))
    # With products in bfloat16 the gradient of a float32 weight is summed over the chunks in float32.
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 9)
    head = replace(drawn_head(3, 8, 9, torch.float32), bias=None)
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(4)).requires_grad_()
    gradients = [
        torch.autograd.grad(score_tokens(hidden, targets[:, None], 1.0, head=h).logprobs.sum(), [hidden, h.weight])
        for h in (head, replace(head, dtype=torch.bfloat16))
    ]
    assert all(gradient.dtype == torch.float32 for gradient in gradients[1])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0.05, atol=0.05)


def tensors_as_large_as(size: int, compute: Callable[[], Any]) -> int:
    """Count the tensors of at least `size` bytes that `compute` allocates."""
    large = set()

    class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), settings=None):  # noqa: ANN001, ANN204
            held = {t.untyped_storage().data_ptr() for t in arguments if isinstance(t, Tensor)}
            found = function(*arguments, **(settings or {}))
            for tensor in found if isinstance(found, tuple | list) else (found,):
                storage = tensor.untyped_storage()
                if storage.nbytes() >= size and storage.data_ptr() not in held:
                    large.add(storage.data_ptr())
            return found

    with Allocations():
        compute()
    return len(large)


def test_no_tensor_of_the_size_of_the_logits_is_allocated_but_the_gradient_of_given_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 1000)
    logits, targets = drawn(3, 64, 500)
    leaf = logits.float().requires_grad_()
    size = leaf.untyped_storage().nbytes()
    assert not tensors_as_large_as(size, lambda: scored(leaf.detach(), targets, 1.0))

    def step(hidden: Tensor, *leaves: Tensor, head: Head | None = None) -> None:
        logprobs, entropies = scored(hidden, targets, 1.0, head=head)
        torch.autograd.grad((logprobs + entropies).sum(), [hidden, *leaves])

    assert tensors_as_large_as(size, lambda: step(leaf)) == 1
    head = drawn_head(4, 16, 500, torch.float32)
    hidden = torch.randn(64, 16).requires_grad_()
    assert not tensors_as_large_as(size // 2, lambda: step(hidden, head.weight, head=head))


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


def test_shards_of_the_vocabulary_give_the_numbers_and_gradients_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width = 5, 3
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 4 * rows)  # several chunks of tokens, the last one smaller
    random = torch.Generator().manual_seed(4)
    weight = torch.randn(8, width, generator=random, dtype=torch.float64)
    padded = torch.cat([weight, torch.full((2, width), 99.0, dtype=torch.float64)])  # two shards, the last rows padding
    states = torch.randn(6, width, generator=random, dtype=torch.float64)
    targets = torch.randint(0, 8, (6,), generator=random)
    factors = torch.randn(2, 6, generator=random, dtype=torch.float64)

    def results(of: Tensor, **settings: Any) -> list[Tensor]:
        hidden, of = states.clone().requires_grad_(), of.clone().requires_grad_()
        logprobs, entropies = scored(hidden, targets, 0.8, head=Head(of), **settings)
        gradients = torch.autograd.grad((factors[0] * logprobs + factors[1] * entropies).sum(), [hidden, of])
        return [logprobs.detach(), entropies.detach(), *gradients]

    expected, shared, barrier = results(weight), [None, None], Barrier(2)
    found: dict[int, list[Tensor]] = {}

    def run(rank: int) -> None:
        shards = OfThreads(rank, rows, 3 if rank else None, shared, barrier)
        found[rank] = results(padded[rank * rows : (rank + 1) * rows], shards=shards)

    threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in range(2):
        torch.testing.assert_close(found[rank][:2], expected[:2], rtol=1e-12, atol=1e-12)
    # Each rank has the gradient of the hidden states through its own tokens.
    torch.testing.assert_close(found[0][2] + found[1][2], expected[2], rtol=1e-12, atol=1e-12)
    of_weight = torch.cat([found[0][3], found[1][3]])
    torch.testing.assert_close(of_weight[:8], expected[3], rtol=1e-12, atol=1e-12)
    assert not of_weight[8:].any()


def test_temperature_of_zero_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"temperature is 0; .*such as 1"):
        scored(*drawn(0, 2, 4), 0)
