"""Evaluator of policy losses: weighed, penalised and aggregated as the trainer does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from relax_actors.algorithms.evaluate.accepted import check_settings, whole_number
from relax_actors.algorithms.evaluate.inputs import Evaluation, Inputs
from relax_actors.algorithms.evaluate.losses import aggregated, gradients_of
from relax_actors.algorithms.losses import MAX_LOG_RATIO
from relax_actors.algorithms.named_functions import load_policy_loss, readers
from relax_actors.algorithms.own_options import settings_of
from relax_actors.algorithms.policy import PolicyInputs
from relax_actors.algorithms.policy_functions import PolicyFunctions
from relax_actors.algorithms.sequence_records import SequenceRecord, choose_tokens
from relax_actors.algorithms.specs import keyword_only, loss_spec
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.registry.catalog import ADVANTAGES, POLICY_LOSSES

_ADVANTAGE = 'evaluate a case of kind "advantage", and give its numbers as the input advantages'
REMEDIES = {
    "name": "give the settings of the preset, which `relax algorithms NAME` prints",
    "surrogate": "the policy loss is the name of the case",
    "proximal": "give the log-probs of the proximal policy as the input old_logprobs",
    "correction": 'evaluate a case of kind "correction", and give its weights as the input weights',
    "reject": 'evaluate a case of kind "correction", and leave the tokens of rejected samples out by the input mask',
    "kl": 'evaluate a case of kind "kl"',
    "entropy": 'evaluate a case of kind "entropy"',
    "distil": 'evaluate a case of kind "distillation"',
    "shaping": 'evaluate a case of kind "advantage" with the shaped rewards',
    **dict.fromkeys(("advantage", "whiten", "components", "weights", "signal_scale"), _ADVANTAGE),
}
"""What to do in place of settings of [algorithm] that belong to another part."""


def policy_loss(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate and aggregate a policy loss, with correction and log-ratio penalty.

    All samples are one step. `settings.seed` seeds the random choice of `clip_cov`.
    """
    known = {key: value for key, value in settings.items() if key != "seed"}
    _check(name, settings)
    algorithm = AlgorithmSection.model_validate({**known, "surrogate": name})
    functions, logprobs, mask = PolicyFunctions(algorithm), inputs.token("logprobs", gradient=True), inputs.mask
    old, weights = inputs.token("old_logprobs"), inputs.optional_token("weights")
    reads_rollout = functions.spec.ratio == "rollout" or functions.has_own_loss
    rollout = inputs.optional_token("rollout_logprobs") if reads_rollout else None
    given: dict[str, Any] = {"level": algorithm.ratio, "rollout": old if rollout is None else rollout}
    if weights is not None:
        given["weights"] = torch.where(mask, weights, 1.0)
    advantages = inputs.sample_or_token("advantages")
    if functions.spec.choose:
        plain = PolicyInputs.of(logprobs, old, advantages, mask, **given)
        given["selected"] = _selected(functions, plain, whole_number(settings, "seed", 0))
    step = PolicyInputs.of(logprobs, old, advantages, mask, **given)
    policy = functions.policy_loss(step)
    per_token = policy.loss if policy.weighted else policy.loss * step.weights
    if algorithm.log_ratio_penalty:
        delta = (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        per_token = per_token + algorithm.log_ratio_penalty * delta.square()
    loss = aggregated(per_token, inputs, algorithm)
    outputs = {"loss": loss.item(), "per_token": per_token * mask, "clipped": policy.clipped & mask}
    return Evaluation({**outputs, "ratio": policy.ratio * mask}, gradients_of(loss, {"logprobs": logprobs}))


def _check(name: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError or ConfigError unless every setting affects the policy loss."""
    section = AlgorithmSection.model_validate({"surrogate": name})
    function = load_policy_loss(name)
    spec, is_own = loss_spec(function), name not in POLICY_LOSSES.built_in
    # The preset of a loss with a ratio of its own may be given.
    has_ratio = is_own or spec.ratio in ("setting", settings.get("ratio"))
    own = dict.fromkeys([*settings_of(function, section), *sorted(spec.further_settings - {"ratio"})])
    constant = ("length",) if settings.get("aggregate") == "constant" else ()
    seed = ("seed",) if spec.choose is not None and "seed" in keyword_only(spec.choose) else ()
    ratio = ("ratio",) if has_ratio else ()
    read = (*ratio, *own, "aggregate", *constant, "log_ratio_penalty", *seed)
    remedies = REMEDIES | {each: _ADVANTAGE for each in settings if readers(ADVANTAGES, each)}
    check_settings(f"policy_loss {name!r}", settings, read, remedies)


def _selected(functions: PolicyFunctions, inputs: PolicyInputs, seed: int) -> Tensor:
    """Choose the tokens of a covariance loss among all trained tokens."""
    mask = inputs.mask
    columns = [t.detach()[mask].numpy() for t in (inputs.logprobs, inputs.ratio, inputs.advantages)]
    record = SequenceRecord(columns[0], columns[1], columns[2], columns[0][:0], {})

    def choose(advantages: Any, logprobs: Any, ratio: Any) -> Any:
        return functions.choose(advantages, logprobs, ratio, seed=seed)

    selected = torch.zeros_like(mask)
    selected[mask] = torch.from_numpy(choose_tokens([record], choose)[0])
    return selected
