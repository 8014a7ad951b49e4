"""What router replay changes, in a step's figures.

`rerouted` is the share of the recorded choices, of a token in a layer, where the trainer's own would have been another,
given that those before it were replayed. What the log-probs would be without replay takes a forward pass of its own: of
one micro-batch every `EVERY` steps, told as `unreplayed_abs_delta`, `unreplayed_k3` and `unreplayed_rerouted`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from relax_actors.algorithms.corrections import mismatch_metrics
from relax_actors.engines.torch.experts import REROUTED, ROUTED

EVERY = 50
UNREPLAYED = "unreplayed_"
_MEANS = ("abs_delta", "k3")
_TOKENS = UNREPLAYED + "tokens"


def without_replay(logprobs: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """Sums, to be joined by `add_metrics`, of how far a pass without replay is from the rollout's log-probs.

    Args:
        logprobs: of that pass, `[batch, seq] float32`.
        rollout: as the tokens were sampled with, the same shape.
        mask: completion tokens, the same shape.
    """
    found = mismatch_metrics(logprobs, rollout, mask)
    return {UNREPLAYED + name: found[name] for name in ("tokens", *_MEANS)}


def unreplayed(choices: Mapping[str, float]) -> dict[str, float]:
    """The routers' counts in a pass without replay."""
    return {UNREPLAYED + name: count for name, count in choices.items()}


def shares(sums: Mapping[str, float]) -> dict[str, float]:
    """A step's sums, with those about replay as shares and means; they are left out where nothing was replayed."""
    found = dict(sums)
    for prefix in ("", UNREPLAYED):
        routed, rerouted = found.pop(prefix + ROUTED, 0.0), found.pop(prefix + REROUTED, 0.0)
        if routed:
            found[prefix + REROUTED] = rerouted / routed
    if tokens := found.pop(_TOKENS, 0.0):
        found |= {UNREPLAYED + name: found[UNREPLAYED + name] / tokens for name in _MEANS}
    return found
