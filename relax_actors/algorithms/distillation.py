"""Distillation losses: divergences of a teacher's and the student's distributions.

The teacher scores the tokens that the student sampled (on-policy distillation, Agarwal et al., "GKD", arXiv
2306.13649). T is the teacher's and S the student's distribution over a *support* of k tokens for each position: the
teacher's k most likely tokens. With k below the vocabulary size the rest of the vocabulary is treated as `Tail` says.

Shapes: log-probs on the support are `[batch, seq, k] float32`, losses `[batch, seq] float32`. Values at positions that
are masked later must be finite.
"""

from __future__ import annotations

import math
from typing import Literal, assert_never

import torch
from torch import Tensor

from relax_actors.algorithms.losses import check_same_shape

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
Tail = Literal["bucket", "renormalise", "drop"]
MIN_TAIL = 1e-6
"""Smallest probability of a tail bucket: below it rounding decides, and the gradient is 0."""
MIN_LOGPROB = -100.0
"""Bound of log-probs: a token that a model never samples has -inf, and 0 times inf is nan."""


def distillation_loss(
    student: Tensor, teacher: Tensor, *, kind: Divergence, tail: Tail = "bucket", teacher_weight: float = 0.5
) -> Tensor:
    """Compute the divergence of each token; gradients flow through `student` only.

    - "forward_kl": `KL(T || S) = sum_v T(v) (log T(v) - log S(v))`; covers all that the teacher does.
    - "reverse_kl": `KL(S || T) = sum_v S(v) (log S(v) - log T(v))`; seeks a mode of the teacher.
    - "jsd": `w KL(T || M) + (1 - w) KL(S || M)` with `M = w T + (1 - w) S`, GKD (arXiv 2306.13649, equation 1). `w`
      is `teacher_weight`. Both ends of `w` are 0 everywhere, so they are refused; code that defines `w = 0` or 1 as a
      KL disagrees on which of the two it is.

    The tail, the tokens outside of the support:

    - "bucket": one more outcome with the rest of the probability. The divergence is that of the coarser distributions:
      at most the divergence over the whole vocabulary, and never negative.
    - "renormalise": T and S are divided by their sums over the support.
    - "drop": the terms of the tail are left out. The sum may be negative.

    If the support is the whole vocabulary, "renormalise" and "drop" give the exact divergence.

    Args:
        student: `[batch, seq, k] float32`, log-probs of the student on the support, with gradient.
        teacher: `[batch, seq, k] float32`, log-probs of the teacher on the support.
        kind: which divergence.
        tail: treatment of the other tokens.
        teacher_weight: weight of the teacher in "jsd", in (0, 1).

    Returns:
        `[batch, seq] float32`.

    Raises:
        ValueError: the shapes differ, or `teacher_weight` is not in (0, 1).
    """
    check_same_shape(student, teacher)
    if not 0 < teacher_weight < 1:
        msg = (
            f"teacher_weight is {teacher_weight}; the mixture needs a weight between 0 and 1. Use forward_kl for "
            "KL(teacher || student), reverse_kl for KL(student || teacher)"
        )
        raise ValueError(msg)
    own, other = _with_tail(student, tail), _with_tail(teacher.detach(), tail)
    match kind:
        case "forward_kl":
            return _kl(other, own)
        case "reverse_kl":
            return _kl(own, other)
        case "jsd":
            mixture = torch.logaddexp(other + math.log(teacher_weight), own + math.log(1 - teacher_weight))
            return teacher_weight * _kl(other, mixture) + (1 - teacher_weight) * _kl(own, mixture)
        case _:
            assert_never(kind)


def sampled_reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Estimate `KL(S || T)` at the sampled tokens: `(log S - log T)^2 / 2`.

    The estimator k2 (Schulman, "Approximating KL divergence", 2020): its expected gradient over tokens that the student
    samples is that of the reverse KL, and it needs no support.

    Args:
        student: `[batch, seq] float32`, log-probs of the sampled tokens, with gradient.
        teacher: `[batch, seq] float32`, log-probs of the same tokens.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape(student, teacher)
    return (student - teacher.detach()).square() / 2


def _kl(left: Tensor, right: Tensor) -> Tensor:
    return (left.exp() * (left - right)).sum(-1)


def _with_tail(logprobs: Tensor, tail: Tail) -> Tensor:
    logprobs = logprobs.clamp(min=MIN_LOGPROB)
    match tail:
        case "bucket":
            rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=MIN_TAIL)
            return torch.cat([logprobs, rest.log()], -1)
        case "renormalise":
            return logprobs - logprobs.logsumexp(-1, keepdim=True)
        case "drop":
            return logprobs
        case _:
            assert_never(tail)
