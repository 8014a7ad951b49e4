"""Losses of examples: the policy learns to write their trained tokens."""

from __future__ import annotations

from relax_actors.algorithms.policy import PolicyInputs, PolicyLoss
from relax_actors.algorithms.specs import LossSpec


@LossSpec(rows="examples", ratio="none", formula="-logp", latex=r"-\ell_t")
def nll(inputs: PolicyInputs) -> PolicyLoss:
    """Compute the negative log-likelihood of each trained token: supervised fine-tuning, and pre-training.

    `-logprob`.
    """
    return PolicyLoss(-inputs.logprobs, inputs.no_token, inputs.ratio.detach())


@LossSpec(rows="examples", ratio="none", formula="-sg(p) logp", latex=r"-\operatorname{sg}(e^{\ell_t})\, \ell_t")
def dft(inputs: PolicyInputs) -> PolicyLoss:
    """Compute the loss of dynamic fine-tuning: each token weighs as much as it is likely (arXiv 2508.05629).

    `-sg(p) logprob` with p the probability of the token: unlikely tokens, whose gradient is largest, count less.
    """
    return PolicyLoss(-inputs.logprobs.detach().exp() * inputs.logprobs, inputs.no_token, inputs.ratio.detach())
