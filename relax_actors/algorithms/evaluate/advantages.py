"""Evaluation of advantages: the estimator of each group, then the statistics of the step that all samples form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from relax_actors.algorithms import step_statistics
from relax_actors.algorithms.advantages.components import decoupled
from relax_actors.algorithms.advantages.estimation import load_advantage
from relax_actors.algorithms.advantages.groups import (
    Estimator,
    Group,
    accepted_settings,
    per_sample_sums,
    requirements_of,
    returns_tokens,
    sample_slices,
)
from relax_actors.algorithms.evaluate.inputs import Evaluation, Inputs
from relax_actors.algorithms.shaping import kl_rewards
from relax_actors.algorithms.step_statistics import RowAdvantages
from relax_actors.config.algorithm import AlgorithmSection

Array = NDArray[Any]
STEP_SETTINGS: dict[str, Any] = {
    "whiten": "none",
    "whiten_epsilon": step_statistics.WHITEN_EPSILON,
    "signal_scale": False,
    "ema_decay": 0.95,
    "kl_coefficient": 0.0,
    "kl_kind": "k1",
}
"""Settings beside those of the estimators, with their defaults."""
ESTIMATOR_SETTINGS = ("scale", "epsilon", "gamma", "gae_lambda", "weights")


def advantage(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Compute the advantages of the samples of one step.

    Args:
        name: value of algorithm.advantage, or "decoupled".
        settings: of `ESTIMATOR_SETTINGS` and `STEP_SETTINGS`.
        inputs: `rewards`; as far as the estimator needs them `token_rewards`, `mask`, `values`, `logprobs`, `squares`
            and `reference_logprobs` for each token, `components`, and `greedy_rewards` and `roles` for each sample;
            `groups`, the group of each sample; `lengths`, where no input has tokens.

    Raises:
        ValueError: a setting is unknown, or an input is missing or malformed.
    """
    _check_settings(settings)
    function: Estimator = decoupled if name == "decoupled" else load_advantage(name)
    bound = accepted_settings(function, {key: value for key, value in settings.items() if key in ESTIMATOR_SETTINGS})
    step, needs = {**STEP_SETTINGS, **settings}, requirements_of(function)
    whole = _with_kl(_whole(inputs), inputs, step, per_token=needs.per_token)
    parts = _groups(inputs, whole.n)
    groups = [_group(whole, index, inputs) for index in parts]
    found = [np.asarray(function(group, **bound), np.float64) for group in groups]
    estimator = partial(function, **bound)
    per_token = [returns_tokens(estimator, group, one) for group, one in zip(groups, found, strict=True)]
    rows = [_row(group, one, of) for group, one, of in zip(groups, found, per_token, strict=True)]
    rows = _completed(name, rows, settings, step)
    outputs = {"advantages": _ordered(rows, parts)}
    if "values" in needs.needs:
        targets = [
            replace(row, values=one + np.where(group.mask, group.input("values"), 0.0))
            for row, one, group in zip(rows, found, groups, strict=True)
        ]
        outputs["returns"] = _ordered(targets, parts)
    return Evaluation(outputs)


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError unless every setting is known and has a possible value."""
    known = (*ESTIMATOR_SETTINGS, *STEP_SETTINGS)
    if unexpected := sorted(set(settings) - set(known)):
        msg = f"{unexpected[0]!r} is not a setting of an advantage; known: {', '.join(known)}"
        raise ValueError(msg)
    # Other engines divide without epsilon.
    section = {n: value for n, value in settings.items() if n in AlgorithmSection.model_fields and n != "epsilon"}
    kl = {"kind": settings.get("kl_kind", STEP_SETTINGS["kl_kind"])}
    try:
        AlgorithmSection.model_validate({**section, "kl": kl})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])).replace("kl.kind", "kl_kind")
        msg = f"setting {name}: {first['msg']}"
        raise ValueError(msg) from error
    for name in ("epsilon", "whiten_epsilon", "kl_coefficient"):
        if not isinstance(settings.get(name, 0.0), int | float):
            msg = f"setting {name} is {settings[name]!r}; give a number"
            raise TypeError(msg)


def _whole(inputs: Inputs) -> Group:
    """Return all samples as one group."""
    raw, rewards = inputs.raw, inputs.sample("rewards").numpy()
    lengths = np.array(inputs.given_lengths(len(rewards)), np.int64)
    names = ("token_rewards", "values", "logprobs", "squares")
    present = _present(lengths)
    tokens: dict[str, Any] = {name: inputs.token(name).numpy()[present] for name in names if name in raw}
    return Group(
        rewards=rewards,
        lengths=lengths,
        loss_mask=inputs.mask.numpy()[present] if inputs.has_tokens else None,
        components={name: np.asarray(part, np.float64) for name, part in raw.get("components", {}).items()},
        **tokens,
    )


def _with_kl(whole: Group, inputs: Inputs, step: Mapping[str, Any], *, per_token: bool) -> Group:
    """Add the KL in the reward."""
    if not step["kl_coefficient"]:
        return whole
    reference = inputs.token("reference_logprobs").numpy()[_present(whole.token_counts)]
    old, kind, coefficient = whole.input("logprobs"), step["kl_kind"], step["kl_coefficient"]
    kl = kl_rewards(old, reference, kind=kind, coefficient=coefficient, mask=whole.mask)
    if per_token:
        return replace(whole, token_rewards=kl if whole.token_rewards is None else whole.token_rewards + kl)
    return replace(whole, rewards=whole.rewards + per_sample_sums(kl, whole.token_counts))


def _groups(inputs: Inputs, samples: int) -> list[list[int]]:
    """Return the samples of each group, in the order of their first samples."""
    ids = inputs.raw.get("groups") or [0] * samples
    if len(ids) != samples:
        msg = f"groups has {len(ids)} ids for {samples} samples; give one for each"
        raise ValueError(msg)
    found: dict[Any, list[int]] = {}
    for i, group in enumerate(ids):
        found.setdefault(group, []).append(i)
    return list(found.values())


def _group(whole: Group, index: list[int], inputs: Inputs) -> Group:
    greedy, roles = inputs.raw.get("greedy_rewards"), inputs.raw.get("roles")
    for name, of_samples in (("greedy_rewards", greedy), ("roles", roles)):
        if of_samples is not None and (not isinstance(of_samples, list) or len(of_samples) != whole.n):
            msg = f"input {name!r} must be a list with one entry for each of {whole.n} samples"
            raise ValueError(msg)
    found = whole.select(index, greedy_reward=None if greedy is None else float(greedy[index[0]]))
    return found if roles is None else replace(found, role=str(roles[index[0]]))


def _row(group: Group, values: Array, per_token: bool) -> RowAdvantages:  # noqa: FBT001 a property of the values
    return RowAdvantages(
        values=values,
        lengths=group.token_counts,
        mask=group.mask,
        rewards=group.totals,
        role=group.role,
        is_per_token=per_token,
    )


def _completed(
    name: str, rows: list[RowAdvantages], settings: Mapping[str, Any], step: Mapping[str, Any]
) -> list[RowAdvantages]:
    """Apply the statistics of the step, as the trainer does."""
    if name == "ema":
        rows, _ = step_statistics.subtract_running_means(rows, {}, decay=step["ema_decay"])
    if settings.get("scale") == "batch_std":
        rows = step_statistics.scale_by_reward_std(rows, epsilon=settings.get("epsilon", 1e-6))
    if step["signal_scale"]:
        rows = step_statistics.scale_by_signal(rows)
    return step_statistics.whiten(rows, over=step["whiten"], epsilon=step["whiten_epsilon"])


def _ordered(rows: list[RowAdvantages], parts: list[list[int]]) -> Tensor:
    """Return the numbers of all samples in their given order, `[samples]` or `[samples, width]`."""
    samples = sum(len(row.lengths) for row in rows)
    if not any(row.per_token for row in rows):
        out = np.zeros(samples)
        for row, index in zip(rows, parts, strict=True):
            out[index] = row.values
        return torch.from_numpy(out)
    padded = np.zeros((samples, max(int(row.lengths.max()) for row in rows)))
    for row, index in zip(rows, parts, strict=True):
        tokens = row.values if row.per_token else np.repeat(row.values, row.lengths)
        for i, part in zip(index, sample_slices(row.lengths), strict=True):
            padded[i, : part.stop - part.start] = tokens[part]
    return torch.from_numpy(padded)


def _present(lengths: Array) -> Array:
    """Return which positions of `[samples, width]` hold a token."""
    found: Array = np.arange(max([1, *lengths.tolist()])) < lengths[:, None]
    return found
