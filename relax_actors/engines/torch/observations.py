"""Cross-entropy of the tokens of observations beside the policy loss: ECHO (arXiv 2605.24517)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from relax_actors.engines.torch.loss_inputs import LossInputs
from relax_actors.engines.torch.step_means import OBSERVATION_NLL, OBSERVED_TOKENS


def of_policy(inputs: LossInputs) -> LossInputs:
    """Return inputs without the tokens of observations, which the policy loss must not see.

    No policy sampled them, so they have no log-probs to compare with. There the trained policy's own take their place,
    or exponentials of the differences might overflow before they are masked.
    """
    if inputs.observed is None:
        return inputs

    def filled(logprobs: Tensor | None) -> Tensor | None:
        if logprobs is None or inputs.observed is None:
            return logprobs
        return torch.where(inputs.observed, inputs.logprobs.detach(), logprobs)

    return replace(
        inputs,
        mask=inputs.mask & ~inputs.observed,
        rollout=torch.where(inputs.observed, inputs.logprobs.detach(), inputs.rollout),
        proximal=filled(inputs.proximal),
        reference=filled(inputs.reference),
    )


def observation_loss(inputs: LossInputs) -> tuple[Tensor, dict[str, float]] | None:
    r"""Compute $-\\sum_{t \\in O} w_t \\ell_t$ over the tokens O of observations, and measure them for `add_metrics`.

    `LossInputs.imitated` holds the factors w, which `training.auxiliary_terms` divides by the number of these tokens in
    the whole update. None without observations.
    """
    if inputs.observed is None or inputs.imitated is None:
        return None
    negative = -inputs.logprobs.masked_fill(~inputs.observed, 0.0)
    measured = {OBSERVATION_NLL: float(negative.detach().sum()), OBSERVED_TOKENS: float(inputs.observed.sum())}
    return (inputs.imitated * negative).sum(), measured
