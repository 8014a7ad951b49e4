"""Losses of reinforcement learning and supervised fine-tuning, one value for each token.

Shapes: log-probs, losses and ratios are `[batch, seq] float32` (natural log); masks are `[batch, seq] bool`, true for
the tokens that count. Values at other positions are ignored, but must be finite.

Invariant: a reduced loss is a sum divided by a count of the whole step, never of the micro-batch. The losses and
gradients of the micro-batches therefore add up to those of the step, however it was split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

LossMode = Literal[
    "token_mean", "prompt_mean", "sample_mean_of_means", "sample_mean_of_sums", "constant", "sample_weight_length"
]
AGGREGATES = {
    "token_mean": (
        "sum over all tokens of the step / number of tokens",
        r"\frac{1}{\sum_i |y_i|} \sum_i \sum_t L_{i,t}",
    ),
    "prompt_mean": (
        "mean over prompts of the mean over all tokens of their samples",
        r"\frac{1}{P} \sum_p \frac{1}{\sum_{i \in p} |y_i|} \sum_{i \in p} \sum_t L_{i,t}",
    ),
    "sample_mean_of_means": (
        "mean over samples of the mean over their tokens",
        r"\frac{1}{N} \sum_i \frac{1}{|y_i|} \sum_t L_{i,t}",
    ),
    "sample_mean_of_sums": ("mean over samples of the sum over their tokens", r"\frac{1}{N} \sum_i \sum_t L_{i,t}"),
    "constant": ("sum over all tokens / (samples of the step x length)", r"\frac{1}{N\,T} \sum_i \sum_t L_{i,t}"),
    "sample_weight_length": (
        "mean over samples of |y| x the sample's loss",
        r"\frac{1}{N} \sum_i |y_i| \cdot \frac{1}{|y_i|} \sum_t L_{i,t}",
    ),
}
"""Formulas of the loss of a step from the losses L of its tokens."""

# exp(20) = 4.9e8. Without a bound, float32 overflows to inf and 0 * inf makes the gradient nan.
MAX_LOG_RATIO = 20.0


def reduce_loss(
    per_token: Tensor, mask: Tensor, *, mode: LossMode, normaliser: float, tokens: Tensor | None = None
) -> Tensor:
    """Reduce the losses of a micro-batch to its part of the step's loss, scalar float32.

    - "token_mean" sums over tokens. With the number of tokens of the step as `normaliser`, all tokens have equal weight
      (DAPO, arXiv 2503.14476).
    - "constant" also sums over tokens. With the number of samples of the step times a constant length as `normaliser`,
      the weight of a token depends neither on the length of its sample nor on the lengths of the others (Dr. GRPO,
      arXiv 2503.20783).
    - "sample_mean_of_sums" also sums over tokens; the `normaliser` is the number of samples of the step.
    - "sample_weight_length" is the same sum: the loss of a sample, one value for all of its tokens, weighs as much as
      the sample is long (LUSPO, arXiv 2602.05261).
    - "sample_mean_of_means" sums the means over the tokens of each sample. With the number of samples of the step as
      `normaliser`, all samples have equal weight (GRPO, arXiv 2402.03300).
    - "prompt_mean" sums the means over all tokens of the samples of each prompt. With the number of prompts of the step
      as `normaliser`, all prompts have equal weight (prompt average of ScaleRL, arXiv 2510.13786).

    The samples and prompts of a step are those with a trained token: an empty sample adds nothing and does not count,
    in every mode.

    Args:
        per_token: `[batch, seq] float32`.
        mask: `[batch, seq] bool`, tokens that count.
        mode: which aggregation.
        normaliser: divisor, from counts of the whole step.
        tokens: `[batch] int64`, tokens of the sample of each sequence with "sample_mean_of_means", of all samples of
            its prompt with "prompt_mean"; None if a sequence is all of it. Other modes do not read it.

    Raises:
        ValueError: the shapes differ, or the normaliser is not positive.
    """
    check_same_shape(per_token, mask)
    if not normaliser > 0:
        msg = f"normaliser is {normaliser}; pass the number of tokens or samples of the step, and skip empty steps"
        raise ValueError(msg)
    sums = per_token.masked_fill(~mask, 0.0).sum(-1)
    if mode in ("sample_mean_of_means", "prompt_mean"):
        counts = mask.sum(-1) if tokens is None else tokens
        sums = sums / counts.clamp(min=1)
    return sums.sum() / normaliser


def sft_loss(logprobs: Tensor, mask: Tensor, normaliser: float) -> Tensor:
    """Compute the cross-entropy of the tokens of `mask`, scalar float32.

    Args:
        logprobs: `[batch, seq] float32`.
        mask: `[batch, seq] bool`, tokens that count.
        normaliser: number of these tokens in the whole step.

    Raises:
        ValueError: the shapes differ, or the normaliser is not positive.
    """
    return reduce_loss(-logprobs, mask, mode="token_mean", normaliser=normaliser)


def add_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Combine metrics of micro-batches or ranks: maximum of `max_*`, sum of others."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
            elif name.startswith("max_"):
                total[name] = max(total[name], value)
            else:
                total[name] += value
    return total


def check_same_shape(left: Tensor, right: Tensor) -> None:
    """Raise ValueError unless the shapes are equal; broadcasting would hide the mistake."""
    if left.shape != right.shape:
        msg = f"shapes {list(left.shape)} and {list(right.shape)} differ; align both to [batch, seq] first"
        raise ValueError(msg)
