"""Policy losses that clip the importance ratio: PPO with its variants, and CISPO."""

from __future__ import annotations

from relax_actors.algorithms.policy import PolicyInputs, PolicyLoss
from relax_actors.algorithms.specs import LossSpec


@LossSpec(
    ratio="setting",
    clips_ratio=True,
    formula="-min(R A, clip(R, 1 - clip_low, 1 + clip_high) A)",
    latex=r"-\min\left(\rho A, \operatorname{clip}(\rho, 1 - \epsilon_{\text{low}}, 1 + \epsilon_{\text{high}}) "
    r"A\right)",
)
def clip(
    inputs: PolicyInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> PolicyLoss:
    """Compute PPO's clipped surrogate loss (arXiv 1707.06347) with separate lower and upper clip bounds.

    `max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))` (clip-higher: DAPO, arXiv 2503.14476).
    With dual clip, the loss is at most `-A c` where A < 0 (arXiv 1912.09729). With `ratio = "sequence_mean"` this is
    GSPO (arXiv 2507.18071), and LUSPO (arXiv 2602.05261) with `aggregate = "sample_weight_length"`.

    Args:
        inputs: tokens of the micro-batch.
        clip_low: lower clip distance, in [0, 1].
        clip_high: upper clip distance, at least 0.
        dual_clip: c of dual clip, above 1; None for no dual clip.

    Raises:
        ValueError: a bound is out of range.
    """
    check_clip(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        msg = f"dual_clip is {dual_clip}; it must be above 1 (3 is usual), or None for no dual clip"
        raise ValueError(msg)
    ratio, weights = inputs.ratio, inputs.advantages
    loss = (-weights * ratio).maximum(-weights * ratio.clamp(1 - clip_low, 1 + clip_high))
    positive, negative = weights > 0, weights < 0
    clipped = (positive & (ratio > 1 + clip_high)) | (negative & (ratio < 1 - clip_low))
    if dual_clip is not None:
        loss = loss.minimum(-weights * dual_clip).where(negative, loss)
        clipped = clipped | (negative & (ratio > dual_clip))
    return PolicyLoss(loss, clipped, ratio.detach())


@LossSpec(
    ratio="setting",
    clips_ratio=True,
    formula="-sg(clip(R, 1 - clip_low, 1 + clip_high)) A lp",
    latex=r"-\operatorname{sg}(c) A \ell_t, \quad c = "
    r"\operatorname{clip}(\rho, 1 - \epsilon_{\text{low}}, 1 + \epsilon_{\text{high}})",
)
def clip_weight(inputs: PolicyInputs, *, clip_low: float = 1.0, clip_high: float = 4.0) -> PolicyLoss:
    """Compute the loss of CISPO: the clipped ratio is a weight without gradient (arXiv 2506.13585).

    `-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob` (MiniMax-M1). The paper switches the lower
    bound off: `clip_low = 1`. A clipped token keeps its gradient, with the bound as its weight.

    Args:
        inputs: tokens of the micro-batch.
        clip_low: lower distance from 1, in [0, 1].
        clip_high: upper distance from 1, at least 0.

    Raises:
        ValueError: a bound is out of range.
    """
    check_clip(clip_low, clip_high)
    ratio = inputs.ratio.detach()
    low, high = 1 - clip_low, 1 + clip_high
    loss = -ratio.clamp(low, high) * inputs.advantages * inputs.logprobs
    return PolicyLoss(loss, (ratio < low) | (ratio > high), ratio)


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raise ValueError unless the clip distances make sense."""
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        msg = f"clip_low is {clip_low} and clip_high is {clip_high}; use clip_low in [0, 1] and clip_high >= 0"
        raise ValueError(msg)
