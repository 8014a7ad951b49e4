"""Loss of labelled answers: good ones become more likely, and bad ones less."""

from __future__ import annotations

from relax_actors.algorithms.policy import PolicyInputs, PolicyLoss
from relax_actors.algorithms.specs import LossSpec
from relax_actors.config.algorithm_parts import LabelsSection


@LossSpec(
    rows="labelled",
    ratio="none",
    over_row=True,
    whole_step=True,
    formula="w (1 - s(+-beta (c - z))), + if good; c = sum(lp - ref), z = max(0, mean of c of other answers) with kto",
    latex=r"w\,(1 - \sigma(\pm\beta (c - z))), \quad c = \sum_t (\ell_t - \ell^{\text{ref}}_t), "
    r"z = \max(0, \bar{c}_{\text{other}})",
)
def unpaired(inputs: PolicyInputs, *, labels: LabelsSection) -> PolicyLoss:
    """Compute the loss of labelled answers: KTO, and unpaired APO-zero.

    The advantage of a good answer is 1, that of a bad one -1. With `labels.loss = "kto"` a row has a second sample with
    advantage 0, the answer to another prompt: their log-ratios estimate the KL of the step, and they are not trained.
    Gradients are those of `preference`.
    """
    import torch  # noqa: PLC0415 facts of losses are read without torch

    logprobs, signs = inputs.logprobs.detach(), inputs.advantages.sign()
    reference = torch.zeros_like(logprobs) if inputs.reference is None else inputs.reference
    delta, is_own = logprobs - reference, (signs != 0).to(logprobs.dtype)
    of_samples = torch.ones_like(logprobs) / inputs.sample_tokens.clamp(min=1).unsqueeze(-1)
    ratio, tokens = inputs.row_sum("own", delta * is_own), inputs.row_sum("own_tokens", is_own).clamp(min=1)
    samples = inputs.row_sum("samples", of_samples)
    divergence = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    others = inputs.step_sum("others", delta * (1 - is_own))
    count = inputs.step_sum("other_answers", of_samples * (1 - is_own))
    if labels.loss == "kto":
        divergence = (others / count.clamp(min=1)).clamp(min=0).to(logprobs.dtype)
    weight = torch.where(signs > 0, labels.good_weight, labels.bad_weight) * is_own
    kept = torch.sigmoid(signs * labels.beta * (ratio - divergence))
    slope = -weight * kept * (1 - kept) * signs * labels.beta
    loss = samples * (weight * (1 - kept) / tokens + slope * (inputs.logprobs - logprobs))
    return PolicyLoss(loss, inputs.no_token, torch.ones_like(logprobs))
