"""Means of a step, over its tokens and samples, from what its micro-batches measured as sums."""

from __future__ import annotations

from collections.abc import Mapping

PER_TOKEN = (
    "abs_delta",
    "k3",
    "ratio",
    "ratio_squared",
    "clipped",
    "kl",
    "entropy",
    "entropy_proxy",
    "weight",
    "bounded",
    "distil",
    "positive_nll",
)
"""Metrics that a micro-batch measures as sums over tokens and a step reports as means."""
OBSERVATION_NLL, OBSERVED_TOKENS = "observation_nll", "observed_tokens"
"""Sum of -log-prob over the tokens of observations, reported as a mean over them, and their number."""
OF_SAMPLES = "sample_"
"""Begins the names of metrics that a micro-batch measures as sums over samples and a step reports as means."""
DEPTHS = ("early", "late")
"""Halves of a sequence; `abs_delta_early` is a mean over the tokens that `tokens_early` counts."""
_ABS_DELTA = {depth: f"abs_delta_{depth}" for depth in DEPTHS}
_TOKENS = {depth: f"tokens_{depth}" for depth in DEPTHS}
_SUMS = frozenset(["trained", "samples", "prompts", *_ABS_DELTA.values(), *_TOKENS.values()])


def step_means(measured: Mapping[str, float]) -> dict[str, float]:
    """Return the means of a step by name; a half of the sequences that has no tokens is left out.

    Args:
        measured: combined measurements of all micro-batches.
    """
    means = {name: measured[name] / measured["tokens"] for name in PER_TOKEN if name in measured}
    for depth in DEPTHS:
        if tokens := measured.get(_TOKENS[depth], 0.0):
            means[_ABS_DELTA[depth]] = measured[_ABS_DELTA[depth]] / tokens
    if tokens := measured.get(OBSERVED_TOKENS, 0.0):
        means[OBSERVATION_NLL] = measured[OBSERVATION_NLL] / tokens
    of_samples = [name for name in measured if name.startswith(OF_SAMPLES)]
    return means | {name.removeprefix(OF_SAMPLES): measured[name] / measured["samples"] for name in of_samples}


def other_measurements(measured: Mapping[str, float]) -> dict[str, float]:
    """Return the measurements that are reported as they are, or as a mean of the same name."""
    return {name: value for name, value in measured.items() if name not in _SUMS and not name.startswith(OF_SAMPLES)}
