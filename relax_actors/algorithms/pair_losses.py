"""Losses of a pair of a chosen and a rejected answer, one value for each pair.

Each is a function of `PairSums` and the settings of [algorithm.pairs]; `surrogates.preference.FORMULAS` has their
formulas and sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from relax_actors.config.algorithm_parts import PairsSection

MIN_POWER = 1e-6
"""Smallest |alpha - 1| of the alpha divergence that is not the reverse KL."""
MAX_EXPONENT = 80.0
"""Largest exponent of a score: exp(80) fits in float32, and the gradient is 0 beyond, as in TRL."""


@dataclass(frozen=True, slots=True)
class PairSums:
    """Sums over the tokens of the answers of pairs, `[pairs]`.

    Attributes:
        chosen_logprobs: log-probs of the chosen answers.
        rejected_logprobs: of the rejected ones.
        chosen_reference: log-probs of the reference of the chosen answers; 0 without one.
        rejected_reference: of the rejected ones.
        chosen_tokens: number of tokens of the chosen answers, at least 1.
        rejected_tokens: of the rejected ones.
        taught: log-probs of the chosen answers without the weights of `ld_alpha`; read by `sft`.
        share: pairs of the step over tokens of chosen answers of the step; read by `sft`.
        matched_reference: difference of the reference's log-probs at the rank of the pair's difference; read by `aot`.
        matched_chosen: log-ratio of the chosen answer at the rank of the pair's rejected one; read by `aot_unpaired`.
        matched_rejected: of the rejected answer at the rank of the pair's chosen one.
    """

    chosen_logprobs: Tensor
    rejected_logprobs: Tensor
    chosen_reference: Tensor
    rejected_reference: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    taught: Tensor
    share: Tensor | float = 0.0
    matched_reference: Tensor | float = 0.0
    matched_chosen: Tensor | float = 0.0
    matched_rejected: Tensor | float = 0.0

    @property
    def chosen(self) -> Tensor:
        """Log-ratios of the chosen answers to the reference."""
        return self.chosen_logprobs - self.chosen_reference

    @property
    def rejected(self) -> Tensor:
        """Log-ratios of the rejected answers to the reference."""
        return self.rejected_logprobs - self.rejected_reference

    @property
    def difference(self) -> Tensor:
        """Difference of the log-ratios."""
        return self.chosen - self.rejected

    def scores(self, settings: PairsSection) -> tuple[Tensor, Tensor]:
        """Scores of answers by the divergence of [algorithm.pairs]: log-ratios for reverse KL."""
        return _score(self.chosen, settings), _score(self.rejected, settings)

    def margin(self, settings: PairsSection) -> Tensor:
        """Difference of the scores times beta."""
        chosen, rejected = self.scores(settings)
        return settings.beta * (chosen - rejected)

    def mean_margin(self, settings: PairsSection) -> Tensor:
        """Difference of the scores, each divided by the tokens of its answer."""
        chosen, rejected = self.scores(settings)
        return chosen / self.chosen_tokens - rejected / self.rejected_tokens

    @property
    def mean_logprobs(self) -> tuple[Tensor, Tensor]:
        """Mean log-prob of a token of the chosen and of the rejected answers."""
        return self.chosen_logprobs / self.chosen_tokens, self.rejected_logprobs / self.rejected_tokens


def _score(x: Tensor, settings: PairsSection) -> Tensor:
    """Return f'(t) of f-DPO up to a constant, with x = log t the log-ratio (arXiv 2309.16240, theorem 1, table 1)."""
    match settings.f_divergence:
        case "reverse_kl":
            return x
        case "forward_kl":
            return 1 - torch.exp(-x)
        case "js":
            return math.log(2) + logsigmoid(x)
        case "alpha":
            power = settings.f_alpha - 1
            if abs(power) < MIN_POWER:
                return x
            return torch.expm1((power * x).clamp(max=MAX_EXPONENT)) / power
        case _:
            assert_never(settings.f_divergence)


def _exo(pairs: PairSums, settings: PairsSection) -> Tensor:
    x, noise = pairs.margin(settings), settings.label_smoothing
    wins = x.sigmoid() * (logsigmoid(x) - math.log1p(-noise))
    return wins + (-x).sigmoid() * (logsigmoid(-x) - math.log(noise))


def _robust(pairs: PairSums, settings: PairsSection) -> Tensor:
    x, noise = pairs.margin(settings), settings.label_smoothing
    return (-(1 - noise) * logsigmoid(x) + noise * logsigmoid(-x)) / (1 - 2 * noise)


def _nca(pairs: PairSums, settings: PairsSection) -> Tensor:
    chosen, rejected = settings.beta * pairs.chosen, settings.beta * pairs.rejected
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _apo_zero(pairs: PairSums, settings: PairsSection) -> Tensor:
    return 1 - (settings.beta * pairs.chosen).sigmoid() + (settings.beta * pairs.rejected).sigmoid()


def _apo_down(pairs: PairSums, settings: PairsSection) -> Tensor:
    return (settings.beta * pairs.chosen).sigmoid() + 1 - (settings.beta * pairs.difference).sigmoid()


def _sppo(pairs: PairSums, settings: PairsSection) -> Tensor:
    return (pairs.chosen - 0.5 / settings.beta).square() + (pairs.rejected + 0.5 / settings.beta).square()


def _bco(pairs: PairSums, settings: PairsSection) -> Tensor:
    return -logsigmoid(settings.beta * pairs.chosen) - logsigmoid(-settings.beta * pairs.rejected)


def _discopop(pairs: PairSums, settings: PairsSection) -> Tensor:
    x = pairs.margin(settings)
    mixture = (x / settings.tau).sigmoid()
    return -logsigmoid(x) * (1 - mixture) + torch.exp(-x) * mixture


def _smooth(x: Tensor, settings: PairsSection) -> Tensor:
    noise = settings.label_smoothing
    return -logsigmoid(x) * (1 - noise) - logsigmoid(-x) * noise


def _aot(pairs: PairSums, settings: PairsSection) -> Tensor:
    own = pairs.chosen_logprobs - pairs.rejected_logprobs
    return _smooth(settings.beta * (own - pairs.matched_reference), settings)


def _aot_unpaired(pairs: PairSums, settings: PairsSection) -> Tensor:
    """The loss of a rank counts for the pair of its chosen answer, and moves the rejected answer of another pair."""
    as_chosen = _smooth(settings.beta * (pairs.chosen - pairs.matched_rejected), settings)
    as_rejected = _smooth(settings.beta * (pairs.matched_chosen - pairs.rejected), settings)
    return as_chosen + as_rejected - as_rejected.detach()


def _shaped(logprobs: Tensor, settings: PairsSection) -> Tensor:
    """Return the reward of AlphaPO (arXiv 2501.03884, equation 6): (1 - p^-alpha) / alpha."""
    if not settings.alpha:
        return logprobs
    return -torch.expm1((-settings.alpha * logprobs).clamp(max=MAX_EXPONENT)) / settings.alpha


def _cpo(pairs: PairSums, settings: PairsSection) -> Tensor:
    chosen, rejected = (_shaped(x, settings) for x in (pairs.chosen_logprobs, pairs.rejected_logprobs))
    return _smooth(settings.beta * (chosen - rejected), settings)


def _simpo(pairs: PairSums, settings: PairsSection) -> Tensor:
    chosen, rejected = (_shaped(x, settings) for x in pairs.mean_logprobs)
    return _smooth(settings.beta * (chosen - rejected) - settings.gamma, settings)


def _odds_ratio(pairs: PairSums, settings: PairsSection) -> Tensor:
    del settings
    chosen, rejected = pairs.mean_logprobs
    return -logsigmoid(chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected)))


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0; x that rounds to 0 has no gradient."""
    x = x.clamp(max=-1e-6)
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


PAIR_LOSSES: dict[str, Callable[[PairSums, PairsSection], Tensor]] = {
    "sigmoid": lambda pairs, settings: -logsigmoid(pairs.margin(settings)),
    "hinge": lambda pairs, settings: torch.relu(1 - pairs.margin(settings)),
    "ipo": lambda pairs, settings: (pairs.mean_margin(settings) - 1 / (2 * settings.beta)).square(),
    "robust": _robust,
    "exo_pair": _exo,
    "nca_pair": _nca,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "sppo_hard": _sppo,
    "bco_pair": _bco,
    "discopop": _discopop,
    "sigmoid_norm": lambda pairs, settings: -logsigmoid(settings.beta * pairs.mean_margin(settings)),
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "sft": lambda pairs, _: -pairs.taught * pairs.share,
    "cpo": _cpo,
    "simpo": _simpo,
    "odds_ratio": _odds_ratio,
}
"""Losses by the keys of `algorithm.pairs.losses`."""
