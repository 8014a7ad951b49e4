"""Evaluator of off-policy corrections: weights of tokens, and sequences that are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from relax_actors.algorithms.corrections import RejectKind, kept_by_opsm, kept_sequences
from relax_actors.algorithms.evaluate.accepted import check_settings, number
from relax_actors.algorithms.evaluate.inputs import Evaluation, Inputs
from relax_actors.algorithms.policy_functions import PolicyFunctions
from relax_actors.algorithms.unused_settings import idle
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.algorithm_parts import RejectSection
from relax_actors.registry.catalog import CORRECTIONS

REJECT: dict[str, RejectKind] = {f"reject_{kind}": kind for kind in get_args(RejectKind) if kind != "none"}


def correction(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate the weights of a correction, or which sequences are kept.

    The name is a value of algorithm.correction.kind; or "reject_geometric", "reject_max", "reject_product" with
    settings `low` and `high`; "reject_k2", "reject_k3" with `max_kl`; or "opsm" with setting `threshold`.
    """
    proximal, rollout, mask = inputs.token("proximal_logprobs"), inputs.token("rollout_logprobs"), inputs.mask
    function = f"correction {name!r}"
    if name == "opsm":
        check_settings(function, settings, ("threshold",))
        if "threshold" not in settings:
            msg = "opsm needs the setting threshold, such as 1e-4"
            raise ValueError(msg)
        advantages, threshold = inputs.sample_or_token("advantages"), number(settings, "threshold")
        return Evaluation({"kept": kept_by_opsm(proximal, rollout, advantages, mask, threshold=threshold)})
    if name in REJECT:
        check_settings(function, settings, ("max_kl",) if REJECT[name] in ("k2", "k3") else ("low", "high"))
        bounds = RejectSection.model_validate({**settings, "kind": REJECT[name]})
        kept = kept_sequences(
            proximal, rollout, mask, kind=REJECT[name], low=bounds.low, high=bounds.high, max_kl=bounds.max_kl
        )
        return Evaluation({"kept": kept})
    section = AlgorithmSection.model_validate({"correction": {**settings, "kind": name}})
    unused = idle(section)
    own = ["normalise"] if name not in CORRECTIONS.built_in else ["level", "low", "high", "normalise"]
    check_settings(function, settings, [each for each in own if f"correction.{each}" not in unused])
    corrected = PolicyFunctions(section).weights(proximal, rollout, mask)
    weights = _normalised(corrected.weight, mask, over=section.correction.normalise)
    return Evaluation({"weights": weights * mask, "bounded": corrected.bounded & mask})


def _normalised(weights: Tensor, mask: Tensor, *, over: str) -> Tensor:
    """Divide weights by their mean over tokens, or over samples, as the trainer does."""
    if over == "none":
        return weights
    share = mask.double()
    if over == "samples":
        share = share / mask.sum(-1, keepdim=True).clamp(min=1)
    mean = (torch.where(mask, weights, 0.0) * share).sum() / share.sum()
    return weights / mean if mean > 0 else weights
