"""Evaluators of KL, log-probs, entropy, the value loss of a critic, and aggregation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

import torch
from torch import Tensor

from relax_actors.algorithms.evaluate.accepted import check_name, check_settings, number
from relax_actors.algorithms.evaluate.inputs import Evaluation, Inputs
from relax_actors.algorithms.kl import KLKind, kl_penalty
from relax_actors.algorithms.losses import LossMode, reduce_loss
from relax_actors.algorithms.sequence_records import SequenceRecord, most_uncertain
from relax_actors.algorithms.values import value_loss as critic_loss
from relax_actors.algorithms.vocabulary import score_tokens
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.algorithm_parts import EntropySection, KlSection
from relax_actors.config.training import CriticSection

KL_REMEDIES = dict.fromkeys(("coefficient", "target", "horizon"), "multiply the outputs by the coefficient yourself")


def kl(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate the KL term of the loss; `old_logprobs` gives the unbiased form's ratio."""
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
    return mean_over_tokens(term, mask, {"logprobs": logprobs})


def logprobs(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate log-probs of `targets`, or minus them as "cross_entropy"."""
    check_name(name, ("full", "cross_entropy"))
    check_settings(f"logprobs {name!r}", settings, ("temperature",))
    logits, mask = inputs.vocabulary("logits", gradient=True), inputs.mask
    targets = inputs.token("targets")
    if ((targets != targets.long()) | (targets < 0) | (targets >= logits.shape[-1])).any():
        msg = f"input 'targets' must be the ids of tokens, from 0 to {logits.shape[-1] - 1}"
        raise ValueError(msg)
    scores = score_tokens(logits, targets.long()[..., None], number(settings, "temperature", 1.0))
    per_token = scores.logprobs[..., 0]
    return mean_over_tokens(-per_token if name == "cross_entropy" else per_token, mask, {"logits": logits})


def entropy(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate the vocabulary's entropy; with "quantile" the most uncertain tokens.

    The setting `quantile` is the share of tokens to select, as `algorithm.entropy.quantile`.
    """
    check_name(name, ("full", "quantile"))
    check_settings(f"entropy {name!r}", settings, ("temperature",) if name == "full" else ("quantile",))
    if name == "quantile":
        return _most_uncertain(EntropySection.model_validate(settings).quantile, inputs)
    logits, mask = inputs.vocabulary("logits", gradient=True), inputs.mask
    no_ids = torch.empty((*mask.shape, 0), dtype=torch.int64)
    scores = score_tokens(logits, no_ids, number(settings, "temperature", 1.0), entropies=True)
    return mean_over_tokens(cast("Tensor", scores.entropies), mask, {"logits": logits})


def _most_uncertain(share: float, inputs: Inputs) -> Evaluation:
    entropies, mask = inputs.token("entropies")[inputs.mask].numpy(), inputs.mask
    record = SequenceRecord(entropies, entropies, entropies, entropies, {})
    selected = torch.zeros_like(mask)
    selected[mask] = torch.from_numpy(most_uncertain([record], share)[0])
    return Evaluation({"selected": selected})


def value_loss(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate the clipped value loss, a mean over tokens; the name is "clip".

    `settings.clip` is the clip range, by default that of `critic.value_clip`; 0 for no clipping.
    """
    check_name(name, ("clip",))
    check_settings("value_loss 'clip'", settings, ("clip",))
    values, mask = inputs.token("values", gradient=True), inputs.mask
    clip = number(settings, "clip", CriticSection().value_clip)
    critic = critic_loss(values, inputs.token("old_values"), inputs.token("returns"), clip=clip)
    return mean_over_tokens(critic.loss, mask, {"values": values}, {"clipped": critic.clipped & mask})


def aggregation(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate an aggregation of losses of tokens; the name is a value of algorithm.aggregate.

    With "prompt_mean", the samples of a prompt have the same number in the input `groups`.
    """
    check_name(name, get_args(LossMode))
    check_settings(f"aggregation {name!r}", settings, ("length",) if name == "constant" else ())
    algorithm = AlgorithmSection.model_validate({**settings, "aggregate": name})
    per_token = inputs.token("per_token", gradient=True)
    loss = aggregated(per_token, inputs, algorithm)
    return Evaluation({"loss": loss.item()}, gradients_of(loss, {"per_token": per_token}))


def aggregated(per_token: Tensor, inputs: Inputs, algorithm: AlgorithmSection) -> Tensor:
    """Return a step's loss; raises ValueError for "constant" without a length."""
    mask = inputs.mask
    samples, tokens = float((mask.sum(-1) > 0).sum()), float(mask.sum())
    normaliser, counts = tokens if algorithm.aggregate == "token_mean" else samples, mask.sum(-1)
    if algorithm.aggregate == "prompt_mean":
        groups = inputs.groups(len(mask))
        for members in groups:
            counts[members] = counts[members].sum()
        normaliser = float(sum(bool(mask[members].any()) for members in groups))
    if algorithm.aggregate == "constant":
        if algorithm.length is None:
            msg = 'aggregate = "constant" needs the setting length'
            raise ValueError(msg)
        normaliser *= algorithm.length
    return reduce_loss(per_token, mask, mode=algorithm.aggregate, normaliser=max(normaliser, 1.0), tokens=counts)


def mean_over_tokens(
    per_token: Tensor, mask: Tensor, leaves: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None
) -> Evaluation:
    """Return numbers by token, their mean, its gradient by `leaves`, and other outputs."""
    loss = reduce_loss(per_token, mask, mode="token_mean", normaliser=max(1.0, float(mask.sum())))
    outputs = {"loss": loss.item(), "per_token": per_token * mask, **(others or {})}
    return Evaluation(outputs, gradients_of(loss, leaves))


def gradients_of(loss: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of a loss in each of the inputs."""
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, gradients, strict=True))
