"""Checks of single computations against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor
from vocabulary import WAYS, Size, measure

from gpu_checks.frame import Failed, Figures, Place, check
from gpu_checks.workload import relative
from relax_actors.algorithms.vocabulary import Head, score_tokens, score_top, squared_probabilities
from relax_actors.engines.torch import varlen
from relax_actors.engines.torch.packing import Packing

HEADS, KEY_HEADS, WIDTH, WINDOW = 4, 2, 64, 50
LENGTHS, SHARED = (70, 90, 61, 200, 33), (0, 40, 40, 0, 20)
LIMITS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 3e-3}
"""Largest relative error of each dtype."""


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None, window: int | None
) -> Tensor:
    """Compute causal attention sequence by sequence, without any kernel; arguments as `Packing.attend`."""
    found = torch.zeros_like(query)
    group = query.shape[1] // key.shape[1]
    for path in packing.paths:
        index = torch.from_numpy(path)
        q, k, v = query[index], key[index].repeat_interleave(group, 1), value[index].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or query.shape[-1] ** -0.5)
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
        if place.on_gpu and varlen.can_attend(torch.empty(1, HEADS, WIDTH, device="cuda", dtype=kind), WINDOW) != (
            kind != torch.float32
        ):
            msg = f"{dtype}: the varlen kernel computes half precision, and only that"
            raise Failed(msg)
        for scale, window in product((None, 0.2), (None, WINDOW)):
            ours = [tensor.to(place.device, copy=True).requires_grad_() for tensor in rounded]
            exact = [tensor.double().requires_grad_() for tensor in rounded]
            output = packing.attend(ours[0], ours[1], ours[2], scale=scale, window=window)
            expected = reference_attention(exact[0], exact[1], exact[2], exact_packing, scale, window)
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
    tokens, vocabulary, width = (64, 2048, 32) if place.is_short else (1024, 151936, 64)  # three chunks of tokens
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = 1.5 * torch.randn(vocabulary, width, generator=generator) / width**0.5
    ids = torch.randint(vocabulary, (tokens, 9), generator=generator)
    figures: Figures = {}
    for dtype, limit in {"float32": 1e-4, "bfloat16": 5e-2}.items():
        kind = getattr(torch, dtype)
        rounded = [hidden.to(kind).float(), weight.to(kind).float()]
        ours = [tensor.to(place.device, copy=True).requires_grad_() for tensor in rounded]
        exact = [tensor.double().requires_grad_() for tensor in rounded]
        found = results(ours[0], Head(ours[1], dtype=kind), ids.to(place.device))
        expected = results(exact[0], Head(exact[1]), ids)
        for parts in (found, expected):
            sum(((n + 1) * part).sum() for n, part in enumerate(parts[:2])).backward()  # type: ignore[union-attr]
        worst = max(relative(a, b) for a, b in zip(found, expected, strict=True))
        pairs = [(o.grad, e.grad) for o, e in zip(ours, exact, strict=True)]
        gradient = max(relative(a, b) for a, b in pairs if a is not None and b is not None)
        figures |= {f"error_{dtype}": worst, f"gradient_error_{dtype}": gradient}
        if not max(worst, gradient) < limit:
            msg = f"{dtype}: relative errors {worst:.2e} and, of the gradient, {gradient:.2e}, more than {limit:g}"
            raise Failed(msg)
    return figures


def results(hidden: Tensor, head: Head, ids: Tensor) -> Sequence[Tensor]:
    """Return everything that is computed over the vocabulary; the first two with a gradient."""
    scores = score_tokens(hidden, ids, 0.9, head=head, entropies=True)
    if scores.entropies is None:
        msg = "no entropies"
        raise Failed(msg)
    of_targets, _, top = score_top(hidden, ids[:, 0], 8, 0.9, head=head)
    return scores.logprobs, scores.entropies, of_targets, top, squared_probabilities(hidden, 0.9, head=head)


@check("vocabulary", seconds=120, is_alone=True)
def vocabulary(place: Place) -> Figures:
    """Peak memory and seconds of an output head and its log-probs: all logits at once, and chunk by chunk."""
    place.require_gpu()
    size = Size(tokens=8192, vocabulary=151936, hidden=1024, device="cuda", dtype="bfloat16")
    measure("chunks", replace(size, tokens=512))  # loads the kernels
    measured = {way: measure(way, size) for way in WAYS}
    whole, chunks = (measured[way] for way in WAYS)
    if not abs(whole["loss"] - chunks["loss"]) < 1e-3 * abs(whole["loss"]):
        msg = f"log-probs sum to {chunks['loss']}, from all logits to {whole['loss']}"
        raise Failed(msg)
    if not chunks["mib"] < whole["mib"] / 3:
        msg = f"chunks take {chunks['mib']:.0f} MiB, all logits {whole['mib']:.0f}"
        raise Failed(msg)
    names = {"all logits": "all_logits", "chunks": "chunks"}
    return {f"{key}_{names[way]}": measured[way][key] for way in WAYS for key in ("mib", "seconds")}
