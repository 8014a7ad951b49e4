"""Metrics of router replay.

`rerouted` is the share of recorded choices (one token in one layer) where the trainer's router would have chosen other
experts, given that the choices of earlier layers were replayed. The log-probs without replay need a forward pass of
their own, which one micro-batch makes every `COMPARISON_INTERVAL` steps. Its metrics are `unreplayed_abs_delta`,
`unreplayed_k3` and `unreplayed_rerouted`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from relax_actors.algorithms.corrections import mismatch_metrics
from relax_actors.engines.torch.experts import REROUTED, ROUTED

COMPARISON_INTERVAL = 50
"""Steps between two comparisons with a pass without replay."""
UNREPLAYED = "unreplayed_"
_MEANS = ("abs_delta", "k3")
_TOKENS = UNREPLAYED + "tokens"


def unreplayed_mismatch(logprobs: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """Measure how far a pass without replay is from the rollout, as sums for `add_metrics`.

    Args:
        logprobs: `[batch, seq] float32`, of the pass without replay.
        rollout: `[batch, seq] float32`, that the tokens were sampled with.
        mask: `[batch, seq] bool`, tokens that count.
    """
    measured = mismatch_metrics(logprobs, rollout, mask)
    return {UNREPLAYED + name: measured[name] for name in ("tokens", *_MEANS)}


def unreplayed_counts(counts: Mapping[str, float]) -> dict[str, float]:
    """Rename the counts of `RerouteCounter.take` of a pass without replay."""
    return {UNREPLAYED + name: count for name, count in counts.items()}


def with_replay_shares(sums: Mapping[str, float]) -> dict[str, float]:
    """Replace the sums of replay metrics in a step's metrics by shares and means; leave them out without replay."""
    shares = dict(sums)
    for prefix in ("", UNREPLAYED):
        routed, rerouted = shares.pop(prefix + ROUTED, 0.0), shares.pop(prefix + REROUTED, 0.0)
        if routed:
            shares[prefix + REROUTED] = rerouted / routed
    if tokens := shares.pop(_TOKENS, 0.0):
        shares |= {UNREPLAYED + name: shares[UNREPLAYED + name] / tokens for name in _MEANS}
    return shares
