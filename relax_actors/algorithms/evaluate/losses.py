"""Evaluators of policy losses, KL, entropy, aggregation and corrections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from relax_actors.algorithms.corrections import correction_weights, kept_by_opsm, kept_sequences
from relax_actors.algorithms.entropy import logprobs_and_entropies
from relax_actors.algorithms.evaluate.inputs import Evaluation, Inputs, unknown
from relax_actors.algorithms.first_pass import SequenceRecord, choose_tokens
from relax_actors.algorithms.functions import Functions
from relax_actors.algorithms.kl import kl_penalty
from relax_actors.algorithms.losses import LossMode, reduce_loss
from relax_actors.algorithms.policy import PolicyInputs
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.algorithm_parts import CorrectionSection, KlSection


def policy_loss(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate a policy loss, aggregated as `settings.aggregate` says.

    All samples are one step. `settings.seed` seeds the random choice of `clip_cov`.
    """
    known = dict(settings)
    seed = int(known.pop("seed", 0))
    algorithm = AlgorithmSection.model_validate({**known, "surrogate": name})
    logprobs, mask = inputs.token("logprobs", gradient=True), inputs.mask
    functions, old = Functions(algorithm), inputs.token("old_logprobs")
    rollout = inputs.optional_token("rollout_logprobs")
    given: dict[str, Any] = {
        "level": algorithm.ratio,
        "rollout": old if rollout is None else rollout,
        "weights": inputs.optional_token("weights"),
    }
    advantages = inputs.sample_or_token("advantages")
    if functions.chooses_tokens:
        plain = PolicyInputs.of(logprobs, old, advantages, mask, **given)
        given["selected"] = _selected(functions, plain, seed)
    found = functions.policy_loss(PolicyInputs.of(logprobs, old, advantages, mask, **given))
    loss = _aggregated(found.loss, mask, algorithm)
    outputs = {"loss": loss.item(), "per_token": found.loss * mask, "clipped": found.clipped & mask}
    return Evaluation({**outputs, "ratio": found.ratio * mask}, _gradients(loss, {"logprobs": logprobs}))


def kl(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate the KL term of the loss, a mean over tokens; `old_logprobs` gives the ratio of the unbiased form."""
    section = KlSection.model_validate({**settings, "kind": name})
    logprobs, mask = inputs.token("logprobs", gradient=True), inputs.mask
    term = kl_penalty(
        logprobs,
        inputs.token("reference_logprobs"),
        kind=section.kind,
        clamp=section.clamp,
        k2_gradient=section.k2_gradient,
        proximal=inputs.token("old_logprobs") if section.unbiased else None,
    )
    loss = reduce_loss(term, mask, mode="token_mean", normaliser=max(1.0, float(mask.sum())))
    return Evaluation({"loss": loss.item(), "per_token": term * mask}, _gradients(loss, {"logprobs": logprobs}))


def entropy(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate the entropy over the vocabulary, a mean over tokens; the name is "full"."""
    _only(name, ("full",), settings, ("temperature",))
    logits, mask = inputs.vocabulary("logits", gradient=True), inputs.mask
    targets = torch.zeros(mask.shape, dtype=torch.int64)
    _, found = logprobs_and_entropies(logits, targets, float(settings.get("temperature", 1.0)))
    loss = reduce_loss(found, mask, mode="token_mean", normaliser=max(1.0, float(mask.sum())))
    return Evaluation({"loss": loss.item(), "per_token": found * mask}, _gradients(loss, {"logits": logits}))


def aggregation(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate an aggregation of losses of tokens; the name is a value of algorithm.aggregate."""
    _only(name, get_args(LossMode), settings, ("length",))
    algorithm = AlgorithmSection.model_validate({**settings, "aggregate": name})
    per_token, mask = inputs.token("per_token", gradient=True), inputs.mask
    loss = _aggregated(per_token, mask, algorithm)
    return Evaluation({"loss": loss.item()}, _gradients(loss, {"per_token": per_token}))


def correction(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate the weights of a correction, or which sequences are kept.

    The name is a value of algorithm.correction.kind; or "reject_geometric", "reject_max", "reject_product" with
    settings `low` and `high`; or "opsm" with setting `threshold`.
    """
    proximal, rollout, mask = inputs.token("proximal_logprobs"), inputs.token("rollout_logprobs"), inputs.mask
    if name == "opsm":
        _only(name, ("opsm",), settings, ("threshold",))
        if "threshold" not in settings:
            msg = "opsm needs the setting threshold, such as 1e-4"
            raise ValueError(msg)
        advantages, threshold = inputs.sample_or_token("advantages"), float(settings["threshold"])
        kept = kept_by_opsm(proximal, rollout, advantages, mask, threshold=threshold)
    elif name.startswith("reject_"):
        _only(name, ("reject_geometric", "reject_max", "reject_product"), settings, ("low", "high"))
        kind: Any = name.removeprefix("reject_")
        low, high = float(settings.get("low", 0.5)), float(settings.get("high", 2.0))
        kept = kept_sequences(proximal, rollout, mask, kind=kind, low=low, high=high)
    else:
        section = CorrectionSection.model_validate({**settings, "kind": name})
        of: Any = section.kind
        found = correction_weights(
            proximal, rollout, mask, kind=of, level=section.level, low=section.low, high=section.high
        )
        return Evaluation({"weights": found.weight * mask, "bounded": found.bounded & mask})
    return Evaluation({"kept": kept})


def _aggregated(per_token: Tensor, mask: Tensor, algorithm: AlgorithmSection) -> Tensor:
    samples, tokens = float((mask.sum(-1) > 0).sum()), float(mask.sum())
    normaliser = tokens if algorithm.aggregate == "token_mean" else samples
    if algorithm.aggregate == "constant":
        if algorithm.length is None:
            msg = 'aggregate = "constant" needs the setting length'
            raise ValueError(msg)
        normaliser *= algorithm.length
    return reduce_loss(per_token, mask, mode=algorithm.aggregate, normaliser=max(normaliser, 1.0))


def _selected(functions: Functions, inputs: PolicyInputs, seed: int) -> Tensor:
    """Choose the tokens of a covariance loss among all trained tokens."""
    mask = inputs.mask
    columns = [t.detach()[mask].numpy() for t in (inputs.logprobs, inputs.ratio, inputs.advantages)]
    record = SequenceRecord(columns[0], columns[1], columns[2], columns[0][:0], {})

    def choose(advantages: Any, logprobs: Any, ratio: Any) -> Any:
        return functions.choose(advantages, logprobs, ratio, seed=seed)

    selected = torch.zeros_like(mask)
    selected[mask] = torch.from_numpy(choose_tokens([record], choose)[0])
    return selected


def _gradients(loss: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def _only(name: str, names: tuple[str, ...], settings: Mapping[str, Any], known: tuple[str, ...]) -> None:
    if name not in names:
        msg = f"name = {name!r} is not known; known: {', '.join(names)}"
        raise ValueError(msg)
    if unexpected := next(unknown(settings, known), None):
        msg = f"setting {unexpected!r} is not known; known: {', '.join(known)}"
        raise ValueError(msg)
