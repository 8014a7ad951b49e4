"""Losses of a pair of a chosen and a rejected answer, one value for each pair.

Each is a function of `PairSums` and the settings of [algorithm.pairs]; `surrogates.preference.FORMULAS` has their
formulas and sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from relax_actors.config.algorithm_parts import PairsSection


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
        share: pairs of the step over tokens of chosen answers of the step; read by `sft`.
    """

    chosen_logprobs: Tensor
    rejected_logprobs: Tensor
    chosen_reference: Tensor
    rejected_reference: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    share: Tensor | float = 0.0

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

    @property
    def mean_difference(self) -> Tensor:
        """Difference of the mean log-ratios of a token."""
        return self.chosen / self.chosen_tokens - self.rejected / self.rejected_tokens

    @property
    def mean_logprobs(self) -> tuple[Tensor, Tensor]:
        """Mean log-prob of a token of the chosen and of the rejected answers."""
        return self.chosen_logprobs / self.chosen_tokens, self.rejected_logprobs / self.rejected_tokens


def _exo(pairs: PairSums, settings: PairsSection) -> Tensor:
    x, noise = settings.beta * pairs.difference, settings.label_smoothing
    wins = x.sigmoid() * (logsigmoid(x) - math.log1p(-noise))
    return wins + (-x).sigmoid() * (logsigmoid(-x) - math.log(noise))


def _robust(pairs: PairSums, settings: PairsSection) -> Tensor:
    x, noise = settings.beta * pairs.difference, settings.label_smoothing
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
    x = settings.beta * pairs.difference
    mixture = (x / settings.tau).sigmoid()
    return -logsigmoid(x) * (1 - mixture) + torch.exp(-x) * mixture


def _smooth(x: Tensor, settings: PairsSection) -> Tensor:
    noise = settings.label_smoothing
    return -logsigmoid(x) * (1 - noise) - logsigmoid(-x) * noise


def _cpo(pairs: PairSums, settings: PairsSection) -> Tensor:
    return _smooth(settings.beta * (pairs.chosen_logprobs - pairs.rejected_logprobs), settings)


def _simpo(pairs: PairSums, settings: PairsSection) -> Tensor:
    chosen, rejected = pairs.mean_logprobs
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
    "sigmoid": lambda pairs, settings: -logsigmoid(settings.beta * pairs.difference),
    "hinge": lambda pairs, settings: torch.relu(1 - settings.beta * pairs.difference),
    "ipo": lambda pairs, settings: (pairs.mean_difference - 1 / (2 * settings.beta)).square(),
    "robust": _robust,
    "exo_pair": _exo,
    "nca_pair": _nca,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "sppo_hard": _sppo,
    "bco_pair": _bco,
    "discopop": _discopop,
    "sigmoid_norm": lambda pairs, settings: -logsigmoid(settings.beta * pairs.mean_difference),
    "sft": lambda pairs, _: -pairs.chosen_logprobs * pairs.share,
    "cpo": _cpo,
    "simpo": _simpo,
    "odds_ratio": _odds_ratio,
}
"""Losses by the keys of `algorithm.pairs.losses`."""
