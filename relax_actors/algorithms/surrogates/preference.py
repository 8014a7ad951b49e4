"""Loss of pairs: the policy learns to prefer the chosen answer to the rejected one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_actors.algorithms.policy import PolicyInputs, PolicyLoss
from relax_actors.algorithms.specs import LossSpec
from relax_actors.config.algorithm_parts import PairsSection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


FORMULAS = {
    "sigmoid": ("-log s(beta (c - r))", r"-\log \sigma(\beta (c - r))", "2305.18290"),
    "hinge": ("max(0, 1 - beta (c - r))", r"\max(0, 1 - \beta (c - r))", "2305.10425"),
    "ipo": (
        "(c / |c| - r / |r| - 1 / (2 beta))^2",
        r"\left(\frac{c}{|y_c|} - \frac{r}{|y_r|} - \frac{1}{2 \beta}\right)^2",
        "2310.12036",
    ),
    "robust": (
        "(-(1 - e) log s(beta (c - r)) + e log s(-beta (c - r))) / (1 - 2 e)",
        r"\frac{-(1 - e) \log \sigma(\beta (c - r)) + e \log \sigma(-\beta (c - r))}{1 - 2 e}",
        "2403.00409",
    ),
    "exo_pair": (
        "KL of s(+-beta (c - r)) to (1 - e, e)",
        r"\operatorname{KL}\left(\sigma(\pm\beta (c - r)) \,\|\, (1 - e, e)\right)",
        "2402.00856",
    ),
    "nca_pair": (
        "-log s(beta c) - 1/2 log s(-beta c) - 1/2 log s(-beta r)",
        r"-\log \sigma(\beta c) - \tfrac12 \log \sigma(-\beta c) - \tfrac12 \log \sigma(-\beta r)",
        "2402.05369",
    ),
    "apo_zero": ("1 - s(beta c) + s(beta r)", r"1 - \sigma(\beta c) + \sigma(\beta r)", "2408.06266"),
    "apo_down": ("s(beta c) + 1 - s(beta (c - r))", r"\sigma(\beta c) + 1 - \sigma(\beta (c - r))", "2408.06266"),
    "sppo_hard": (
        "(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2",
        r"\left(c - \frac{1}{2 \beta}\right)^2 + \left(r + \frac{1}{2 \beta}\right)^2",
        "2405.00675",
    ),
    "bco_pair": (
        "-log s(beta c) - log s(-beta r)",
        r"-\log \sigma(\beta c) - \log \sigma(-\beta r)",
        "2404.04656",
    ),
    "discopop": (
        "-(1 - m) log s(x) + m exp(-x), x = beta (c - r), m = s(x / tau)",
        r"-(1 - m) \log \sigma(x) + m e^{-x}, \quad x = \beta (c - r), m = \sigma(x / \tau)",
        "2406.08414",
    ),
    "sigmoid_norm": (
        "-log s(beta (c / |c| - r / |r|))",
        r"-\log \sigma\left(\beta \left(\frac{c}{|y_c|} - \frac{r}{|y_r|}\right)\right)",
        "2411.15124",
    ),
    "aot": (
        "-log s(beta (d - ref(d))), d = lp(c) - lp(r), ref(d) the reference's of the same rank in the step",
        r"-\log \sigma(\beta (d_{(i)} - d^{\text{ref}}_{(i)})), \quad d = \ell_c - \ell_r \text{ sorted over the step}",
        "2406.05882",
    ),
    "aot_unpaired": (
        "-log s(beta (c - r)), c and r of the same rank in the step",
        r"-\log \sigma(\beta (c_{(i)} - r_{(i)})) \text{ sorted over the step}",
        "2406.05882",
    ),
    "sft": (
        "-lp of the chosen answers, mean over their tokens",
        r"-\frac{1}{\sum |y_c|} \sum_t \ell_t \text{ of chosen answers}",
        "2305.10425",
    ),
    "cpo": ("-log s(beta (lp(c) - lp(r)))", r"-\log \sigma(\beta (\ell_c - \ell_r))", "2401.08417"),
    "simpo": (
        "-log s(beta (lp(c) / |c| - lp(r) / |r|) - gamma)",
        r"-\log \sigma\left(\beta \left(\frac{\ell_c}{|y_c|} - \frac{\ell_r}{|y_r|}\right) - \gamma\right)",
        "2405.14734",
    ),
    "odds_ratio": (
        "-log s(log odds(lp(c) / |c|) - log odds(lp(r) / |r|))",
        r"-\log \sigma\left(\log \frac{p_c}{1 - p_c} - \log \frac{p_r}{1 - p_r}\right), \quad p = e^{\ell / |y|}",
        "2403.07691",
    ),
}
"""Formula as plain text and as LaTeX, and arXiv number of its source, of each loss of `algorithm.pairs.losses`.

c and r are the log-ratios of the chosen and the rejected answer to the reference, summed over their tokens, |c| and |r|
their numbers of tokens, lp(c) and lp(r) their log-probs, s the sigmoid, e `label_smoothing`, which acts on `aot`,
`aot_unpaired`, `cpo` and `simpo`, too. With `f_divergence`, c and r are scores of the log-ratios
in the losses of `OF_SCORES`, and log-ratios in all others.
"""


_TINY = 1e-30
_SUMS = ("chosen_logprobs", "rejected_logprobs", "chosen_reference", "rejected_reference")


@LossSpec(
    rows=("pairs", "sampled"),
    ratio="none",
    over_row=True,
    formula="losses of c = sum(lp - ref) of the chosen answer and r of the rejected one",
    latex=r"\sum_k w_k f_k(c, r), \quad c = \sum_t (\ell_t - \ell^{\text{ref}}_t) \text{ of the chosen answer}, r "
    r"\text{ of the rejected one}",
)
def preference(inputs: PolicyInputs, *, pairs: PairsSection) -> PolicyLoss:
    """Compute the weighted sum of the losses of a pair that `algorithm.pairs.losses` names: DPO and its relatives.

    A loss is a function of sums over the tokens of the two answers. Its derivatives by these sums are constants, and
    each token has the gradient of its own log-prob times the one of its answer: as in GSPO-token, the gradient of a
    pair is that of its loss, wherever its sequences are computed. Both samples of a pair have its loss, so that the
    mean over samples (`aggregate = "sample_mean_of_sums"`) is the mean over pairs.

    The chosen answer has a positive advantage and the rejected one a negative advantage. Of sampled rows these are the
    best and the worst sample (`advantage = "best_worst"`): online DPO. A row without both has no loss, but its samples
    would count in means over the step: the trainer drops such rows.
    """
    import torch  # noqa: PLC0415 facts of losses are read without torch

    from relax_actors.algorithms.pair_losses import PAIR_LOSSES, PairSums  # noqa: PLC0415

    logprobs, is_chosen, is_rejected = inputs.logprobs.detach(), inputs.advantages > 0, inputs.advantages < 0
    part = _weights_of_length(inputs, pairs.ld_alpha)
    reference = torch.zeros_like(logprobs) if inputs.reference is None else inputs.reference
    ones = torch.ones_like(logprobs)

    def sums(name: str, values: Tensor) -> list[Tensor]:
        halves = {"chosen": is_chosen, "rejected": is_rejected}
        return [inputs.row_sum(f"{half}_{name}", values * member) for half, member in halves.items()]

    chosen, rejected = (own.clone().requires_grad_() for own in sums("logprobs", logprobs * part))
    taught = inputs.row_sum("taught_logprobs", logprobs * is_chosen).clone().requires_grad_()
    counts, references = sums("tokens", ones), sums("reference", reference * part)
    tokens, is_pair = [own.clamp(min=1) for own in counts], (counts[0] > 0) & (counts[1] > 0)
    of_samples = ones / inputs.sample_tokens.clamp(min=1).unsqueeze(-1)
    samples = inputs.row_sum("samples", of_samples)
    share: Tensor | float = 0.0
    if "sft" in pairs.losses:
        count = inputs.step_sum("taught", is_chosen.to(logprobs.dtype)).clamp(min=1)
        share = (inputs.step_sum("all_samples", of_samples) / count).to(logprobs.dtype) / samples
    matched = _matched(inputs) if {"aot", "aot_unpaired"} & pairs.losses.keys() else {}
    given = PairSums(chosen, rejected, references[0], references[1], tokens[0], tokens[1], taught, share, **matched)
    with torch.enable_grad():
        loss = torch.stack([weight * PAIR_LOSSES[name](given, pairs) for name, weight in pairs.losses.items()]).sum(0)
        leaves = (chosen, rejected, taught)
        if pairs.weighted:
            loss = loss * _weight_of_pair(inputs, tokens)
        slopes = torch.autograd.grad(loss.sum(), leaves, allow_unused=True, materialize_grads=True)
    slope = part * (is_chosen * slopes[0] + is_rejected * slopes[1]) + is_chosen * slopes[2]
    value = (loss.detach() / inputs.row_sum("all_tokens", ones)).expand_as(logprobs)
    margin = given.difference.detach().squeeze(-1)
    return PolicyLoss(
        is_pair * samples * (value + slope * (inputs.logprobs - logprobs)),
        inputs.no_token,
        ones,
        measured={"pair_accuracy": (margin > 0).to(logprobs.dtype), "pair_margin": pairs.beta * margin},
    )


def _weights_of_length(inputs: PolicyInputs, ld_alpha: float | None) -> Tensor:
    """Return the weight of each token's log-prob: `ld_alpha` beyond the shorter answer (arXiv 2409.06411, equation 7).

    A sample of several sequences counts its tokens in each of them.
    """
    import torch  # noqa: PLC0415 as above

    ones = torch.ones_like(inputs.logprobs)
    if ld_alpha is None or inputs.row_tokens is None:
        return ones
    shared = torch.minimum(inputs.sample_tokens, inputs.row_tokens - inputs.sample_tokens)
    return torch.where(inputs.mask.cumsum(-1) > shared.unsqueeze(-1), ones * ld_alpha, ones)


def _weight_of_pair(inputs: PolicyInputs, tokens: Sequence[Tensor]) -> Tensor:
    """Return the weight of each sequence's pair, `[batch, 1]` (WPO, arXiv 2406.11827, equation 2, sampled alignment).

    It is above 1 where the policy's tokens are likelier than its average token; as in TRL 1.16, nothing caps it.

    Args:
        inputs: tokens of the micro-batch, with `squares`.
        tokens: tokens of the chosen and the rejected answers, `[batch, 1]` each.

    Raises:
        ValueError: `squares` is missing.
    """
    if inputs.squares is None:
        msg = "the weights of pairs need the sums of squared probabilities; the engine gave none"
        raise ValueError(msg)
    aligned = inputs.logprobs.detach() - inputs.squares.detach().clamp(min=_TINY).log()
    halves = {"chosen": inputs.advantages > 0, "rejected": inputs.advantages < 0}
    sums = [inputs.row_sum(f"{half}_aligned", aligned * member) for half, member in halves.items()]
    return (sums[0] / tokens[0] + sums[1] / tokens[1]).exp()


def _matched(inputs: PolicyInputs) -> dict[str, Tensor]:
    """Return numbers of other pairs with the rank of each sequence's pair, `[batch, 1]`.

    Alignment by optimal transport compares sorted numbers (AOT, arXiv 2406.05882). The sums of all pairs are constants,
    so the match is the same however the step is cut. Earlier pairs come first in a tie.
    """
    columns = {name: inputs.all_rows(name)[0] for name in _SUMS}
    places = inputs.all_rows(_SUMS[0])[1]
    chosen = columns["chosen_logprobs"] - columns["chosen_reference"]
    rejected = columns["rejected_logprobs"] - columns["rejected_reference"]
    own = columns["chosen_logprobs"] - columns["rejected_logprobs"]
    reference = columns["chosen_reference"] - columns["rejected_reference"]

    def at_rank(numbers: Tensor, of: Tensor) -> Tensor:
        """Return the number at the rank that each pair has by the numbers `of`."""
        rank = of.argsort(stable=True).argsort(stable=True)
        chosen = numbers.sort().values[rank][places]
        return chosen.to(inputs.logprobs.dtype).unsqueeze(-1)

    return {
        "matched_reference": at_rank(reference, own),
        "matched_chosen": at_rank(chosen, rejected),
        "matched_rejected": at_rank(rejected, chosen),
    }
