"""Evaluators of KL, entropy and aggregation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from relax_actors.algorithms.entropy import logprobs_and_entropies
from relax_actors.algorithms.evaluate.accepted import check_name, check_settings
from relax_actors.algorithms.evaluate.inputs import Evaluation, Inputs
from relax_actors.algorithms.kl import KLKind, kl_penalty
from relax_actors.algorithms.losses import LossMode, reduce_loss
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.algorithm_parts import KlSection

KL_REMEDIES = dict.fromkeys(("coefficient", "target", "horizon"), "multiply the outputs by the coefficient yourself")


def kl(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate the KL term of the loss, a mean over tokens; `old_logprobs` gives the ratio of the unbiased form."""
    check_name(name, get_args(KLKind))
    check_settings(f"kl {name!r}", settings, ("clamp", "k2_gradient", "unbiased"), KL_REMEDIES)
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
    return Evaluation({"loss": loss.item(), "per_token": term * mask}, gradients_of(loss, {"logprobs": logprobs}))


def entropy(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate the entropy over the vocabulary, a mean over tokens; the name is "full"."""
    check_name(name, ("full",))
    check_settings("entropy 'full'", settings, ("temperature",))
    logits, mask = inputs.vocabulary("logits", gradient=True), inputs.mask
    targets = torch.zeros(mask.shape, dtype=torch.int64)
    _, found = logprobs_and_entropies(logits, targets, float(settings.get("temperature", 1.0)))
    loss = reduce_loss(found, mask, mode="token_mean", normaliser=max(1.0, float(mask.sum())))
    return Evaluation({"loss": loss.item(), "per_token": found * mask}, gradients_of(loss, {"logits": logits}))


def aggregation(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate an aggregation of losses of tokens; the name is a value of algorithm.aggregate."""
    check_name(name, get_args(LossMode))
    check_settings(f"aggregation {name!r}", settings, ("length",) if name == "constant" else ())
    algorithm = AlgorithmSection.model_validate({**settings, "aggregate": name})
    per_token, mask = inputs.token("per_token", gradient=True), inputs.mask
    loss = aggregated(per_token, mask, algorithm)
    return Evaluation({"loss": loss.item()}, gradients_of(loss, {"per_token": per_token}))


def aggregated(per_token: Tensor, mask: Tensor, algorithm: AlgorithmSection) -> Tensor:
    """Return the loss of a step of all samples.

    Raises:
        ValueError: the aggregation is "constant", and there is no length.
    """
    samples, tokens = float((mask.sum(-1) > 0).sum()), float(mask.sum())
    normaliser = tokens if algorithm.aggregate == "token_mean" else samples
    if algorithm.aggregate == "constant":
        if algorithm.length is None:
            msg = 'aggregate = "constant" needs the setting length'
            raise ValueError(msg)
        normaliser *= algorithm.length
    return reduce_loss(per_token, mask, mode=algorithm.aggregate, normaliser=max(normaliser, 1.0))


def gradients_of(loss: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of a loss in each of the inputs."""
    found = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))
