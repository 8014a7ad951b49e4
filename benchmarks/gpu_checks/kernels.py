"""Checks of single computations against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from gpu_checks.frame import Failed, Figures, Place, check
from gpu_checks.workload import relative
from relax_actors.algorithms.entropy import logprobs_and_entropies, logprobs_at, squared_probabilities
from relax_actors.algorithms.losses import token_logprobs
from relax_actors.engines.torch.packing import Packing, attend_rows

HEADS, KEY_HEADS, WIDTH, WINDOW = 4, 2, 64, 50
LENGTHS, SHARED = (70, 90, 61, 200, 33), (0, 40, 40, 0, 20)
LIMITS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 3e-3}
"""Largest relative error of each dtype."""


def reference_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, window: int | None) -> Tensor:
    """Compute causal attention sequence by sequence, without any kernel; arguments as `Packing.attend`."""
    found = torch.zeros_like(query)
    group = query.shape[1] // key.shape[1]
    for path in packing.paths:
        index = torch.from_numpy(path)
        q, k, v = query[index], key[index].repeat_interleave(group, 1), value[index].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / query.shape[-1] ** 0.5
        distance = torch.arange(len(path))[:, None] - torch.arange(len(path))
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        found = found.index_copy(0, index, torch.einsum("hqk,khd->qhd", weights, v))
    return found


@check("attention", seconds=120)
def attention(place: Place) -> Figures:
    """Attention of packed sequences with shared prefixes and windows, forward and backward, in each dtype."""
    generator = torch.Generator().manual_seed(1)
    exact_packing = Packing.of(LENGTHS, torch.device("cpu"), SHARED)
    packing = Packing.of(LENGTHS, torch.device(place.device), SHARED)
    total = exact_packing.positions.shape[1]
    inputs = [
        torch.randn(total, heads, WIDTH, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    weight = torch.randn(total, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    figures: Figures = {}
    for dtype in LIMITS if place.on_gpu else ("float32",):
        kind = getattr(torch, dtype)
        rounded = [tensor.to(kind) for tensor in inputs]
        worst = 0.0
        for window in (None, WINDOW):
            ours = [tensor.to(place.device, copy=True).requires_grad_() for tensor in rounded]
            exact = [tensor.double().requires_grad_() for tensor in rounded]
            output = packing.attend(ours[0], ours[1], ours[2], partial(attend_rows, scale=None), window)
            expected = reference_attention(exact[0], exact[1], exact[2], exact_packing, window)
            (output * weight.to(place.device, kind)).sum().backward()
            (expected * weight.to(kind).double()).sum().backward()
            pairs = [(output, expected), *((o.grad, e.grad) for o, e in zip(ours, exact, strict=True))]
            worst = max(worst, *(relative(a, b) for a, b in pairs if a is not None and b is not None))
        figures[f"error_{dtype}"] = worst
        if not worst < LIMITS[dtype]:
            msg = f"{dtype}: relative error {worst:.2e}, more than {LIMITS[dtype]:g}"
            raise Failed(msg)
    return figures


@check("logprobs", seconds=120)
def logprobs(place: Place) -> Figures:
    """Log-probs, entropies, top-k log-probs and squared probabilities over the vocabulary, and their gradients."""
    tokens, vocabulary = (64, 2048) if place.is_short else (256, 151936)
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(tokens, vocabulary, generator=generator)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    top = torch.randint(vocabulary, (tokens, 8), generator=generator)
    figures: Figures = {}
    for dtype in ("float32", "bfloat16"):
        rounded = logits.to(getattr(torch, dtype))
        ours = rounded.to(place.device, copy=True).requires_grad_()
        exact = rounded.double().requires_grad_()
        found = results(ours, targets.to(place.device), top.to(place.device))
        expected = results(exact, targets, top)
        for parts in (found, expected):
            sum(((n + 1) * part).sum() for n, part in enumerate(parts[:-1])).backward()  # type: ignore[union-attr]
        worst = max(relative(a, b) for a, b in zip(found, expected, strict=True))
        if ours.grad is None or exact.grad is None:
            msg = "no gradient"
            raise Failed(msg)
        gradient = relative(ours.grad, exact.grad)
        figures |= {f"error_{dtype}": worst, f"gradient_error_{dtype}": gradient}
        limit = {"float32": 1e-5, "bfloat16": 5e-3}[dtype]  # the gradient has the dtype of the logits
        if not (worst < 1e-5 and gradient < limit):
            msg = f"{dtype}: relative errors {worst:.2e} and, of the gradient, {gradient:.2e}"
            raise Failed(msg)
    return figures


def results(logits: Tensor, targets: Tensor, top: Tensor) -> Sequence[Tensor]:
    """Return everything that is computed from logits; all but the last with a gradient."""
    chosen, entropies = logprobs_and_entropies(logits, targets, 0.9)
    alone = token_logprobs(logits[None], targets[None], 0.9)[0]
    return alone, chosen, entropies, logprobs_at(logits, top, 0.9), squared_probabilities(logits, 0.9)
