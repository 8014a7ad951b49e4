"""Evaluator of the value loss of a critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from relax_actors.algorithms import values as losses
from relax_actors.algorithms.evaluate.accepted import check_name, check_settings
from relax_actors.algorithms.evaluate.inputs import Evaluation, Inputs
from relax_actors.algorithms.losses import reduce_loss
from relax_actors.config.training import CriticSection


def value_loss(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate the clipped value loss, a mean over tokens; the name is "clip".

    `settings.clip` is the clip range, by default that of `critic.value_clip`; 0 for no clipping.
    """
    check_name(name, ("clip",))
    check_settings("value_loss 'clip'", settings, ("clip",))
    values, mask = inputs.token("values", gradient=True), inputs.mask
    clip = float(settings.get("clip", CriticSection().value_clip))
    found = losses.value_loss(values, inputs.token("old_values"), inputs.token("returns"), clip=clip)
    loss = reduce_loss(found.loss, mask, mode="token_mean", normaliser=max(1.0, float(mask.sum())))
    (gradient,) = torch.autograd.grad(loss, [values])
    outputs = {"loss": loss.item(), "per_token": found.loss * mask, "clipped": found.clipped & mask}
    return Evaluation(outputs, {"values": gradient})
