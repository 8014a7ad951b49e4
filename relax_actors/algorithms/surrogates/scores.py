"""Losses of reward models: of pairs of answers, of labelled answers, and of labelled steps."""

from __future__ import annotations

from relax_actors.algorithms.policy import PolicyInputs, PolicyLoss
from relax_actors.algorithms.specs import LossSpec
from relax_actors.config.algorithm_parts import ScoresSection


@LossSpec(
    rows="pairs",
    head="scores",
    ratio="none",
    over_row=True,
    formula="-log s(c - r - margin) + centring (c + r)^2; c, r: scores of the chosen and the rejected answer",
    latex=r"-\log \sigma(c - r - m) + \lambda\,(c + r)^2",
)
def bradley_terry(inputs: PolicyInputs, *, scores: ScoresSection) -> PolicyLoss:
    """Compute the loss of the scores of a pair: the chosen answer wins with probability `s(c - r)`.

    The margin m is that of Llama 2 (arXiv 2307.09288, section 3.2.2), the term of `scores.centring` that of arXiv
    2312.09244. As in `preference`, each score has the derivative of its pair's loss as a constant, so that the two
    answers may be computed in different micro-batches. Both have the loss of the pair, whose mean over samples is the
    mean over pairs.
    """
    import torch  # noqa: PLC0415 facts of losses are read without torch
    from torch.nn.functional import logsigmoid  # noqa: PLC0415

    own, margins = inputs.scored
    score, is_chosen = own[..., 0], inputs.advantages > 0
    held, ones = score.detach(), torch.ones_like(score)
    chosen, rejected = inputs.row_sum("chosen", held * is_chosen), inputs.row_sum("rejected", held * ~is_chosen)
    answers = inputs.row_sum("answers", ones / inputs.sample_tokens.clamp(min=1).unsqueeze(-1))
    difference = chosen - rejected - inputs.row_sum("margin", margins * is_chosen)
    loss = -logsigmoid(difference) + scores.centring * (chosen + rejected).square()
    wins, centre = torch.sigmoid(-difference), 2 * scores.centring * (chosen + rejected)
    slope = torch.where(is_chosen, centre - wins, centre + wins)
    value = loss / inputs.row_sum("tokens", ones).clamp(min=1)
    gap = (chosen - rejected).squeeze(-1)
    return PolicyLoss(
        answers * (value + slope * (score - held)),
        inputs.no_token,
        ones,
        measured={
            "pair_accuracy": (gap > 0).to(score.dtype),
            "pair_margin": gap,
            "score": ((chosen + rejected) / 2).squeeze(-1),
        },
    )


@LossSpec(
    rows="labelled",
    head="scores",
    ratio="none",
    formula="-log p(label of the answer), p of the logits at its end",
    latex=r"-\log p_{\text{label}}, \quad p = \operatorname{softmax}(\text{scores}) \text{ or } \sigma(\text{score})",
)
def answer_class(inputs: PolicyInputs) -> PolicyLoss:
    """Compute the cross-entropy of the label of an answer, read at its last token; binary with one class."""
    return _cross_entropy(inputs)


@LossSpec(
    rows="steps",
    head="scores",
    ratio="none",
    formula="-log p(label of the step), p of the logits at the separator behind it",
    latex=r"-\log p_{\text{label}} \text{ at the end of each step}, \quad p = \operatorname{softmax}(\text{scores}) "
    r"\text{ or } \sigma(\text{score})",
)
def step_class(inputs: PolicyInputs) -> PolicyLoss:
    """Compute the cross-entropy of the label of each step, read at its separator; binary with one class."""
    return _cross_entropy(inputs)


def _cross_entropy(inputs: PolicyInputs) -> PolicyLoss:
    import torch  # noqa: PLC0415 facts of losses are read without torch

    from relax_actors.algorithms.class_scores import class_logprobs  # noqa: PLC0415

    scores, labels = inputs.scored
    logprobs = class_logprobs(scores)
    classes = labels.long().clamp(0, logprobs.shape[-1] - 1)  # padding may hold anything
    loss = -logprobs.gather(-1, classes.unsqueeze(-1)).squeeze(-1)
    right = ((logprobs.argmax(-1) == classes) & inputs.mask).sum(-1) / inputs.mask.sum(-1).clamp(min=1)
    return PolicyLoss(loss, inputs.no_token, torch.ones_like(loss), measured={"label_accuracy": right.to(loss.dtype)})
