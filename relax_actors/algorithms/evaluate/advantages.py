"""Evaluation of advantages: each group's estimator, then the step's statistics."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms import step_statistics
from relax_actors.algorithms.advantages.components import decoupled
from relax_actors.algorithms.advantages.groups import (
    Estimator,
    Group,
    check_advantages,
    per_sample_sums,
    returns_tokens,
    sample_slices,
)
from relax_actors.algorithms.advantages.returns import critic_targets
from relax_actors.algorithms.evaluate.accepted import check_settings, number
from relax_actors.algorithms.evaluate.inputs import Evaluation, Inputs
from relax_actors.algorithms.named_functions import load_advantage
from relax_actors.algorithms.own_options import SETTINGS
from relax_actors.algorithms.shaping import kl_rewards
from relax_actors.algorithms.specs import AdvantageSpec, advantage_spec, settings_accepted
from relax_actors.algorithms.step_statistics import RowAdvantages
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.registry.catalog import ADVANTAGES

Array = NDArray[Any]
STEP_SETTINGS: dict[str, Any] = {
    "whiten": "none",
    "whiten_epsilon": step_statistics.WHITEN_EPSILON,
    "signal_scale": False,
    "ema_decay": 0.95,
    "critic_lambda": None,
    "kl_coefficient": 0.0,
    "kl_kind": "k1",
}
"""Settings beside those of the estimators, with their defaults."""
_TOKENS = ("values", "logprobs", "squares")


def advantage(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Compute the advantages of the samples of one step.

    Args:
        name: value of algorithm.advantage, or "decoupled".
        settings: the estimator's parameters, and `STEP_SETTINGS`.
        inputs: `rewards`; as far as the estimator needs them `token_rewards`, `mask`, `values`, `logprobs`, `squares`,
            `turns` and `reference_logprobs` for each token, `components`, and `greedy_rewards` and `roles` for each
            sample; `groups`, the group of each sample; `lengths`, where no input has tokens.

    Raises:
        ValueError: a setting or an input is malformed, missing or not read, or the estimator returned something else
            than one finite number for each sample or token.
    """
    function: Estimator = decoupled if name == "decoupled" else load_advantage(name)
    step = {**STEP_SETTINGS, **settings}
    _check_settings(name, function, settings)
    bound = {**_without_default(function, _section(settings)), **settings_accepted(function, _own(settings))}
    estimator: Estimator = partial(function, **bound)
    spec = advantage_spec(function)
    whole = _with_kl(_whole(name, spec, inputs), inputs, step, per_token=spec.per_token)
    parts = inputs.groups(whole.n)
    groups = [_group(whole, index, spec.needs, inputs) for index in parts]
    advantages = [_checked(np.asarray(estimator(group)), group, name) for group in groups]
    per_token = [returns_tokens(estimator, group, one) for group, one in zip(groups, advantages, strict=True)]
    rows = [_row(group, one, of) for group, one, of in zip(groups, advantages, per_token, strict=True)]
    rows = _completed(spec, rows, settings, step)
    outputs = {"advantages": _ordered(rows, parts)}
    if "values" in spec.needs:
        critic_lambda = step["critic_lambda"]
        targets = [
            replace(row, values=critic_targets(group, one, gamma=bound.get("gamma", 1.0), critic_lambda=critic_lambda))
            for row, one, group in zip(rows, advantages, groups, strict=True)
        ]
        outputs["returns"] = _ordered(targets, parts)
    return Evaluation(outputs)


def _section(settings: Mapping[str, Any]) -> AlgorithmSection:
    """Return [algorithm] with a case's settings; an epsilon of 0 is allowed apart.

    Raises:
        ValidationError: a value is impossible.
        TypeError: a value is no number.
    """
    for name in ("epsilon", "whiten_epsilon", "kl_coefficient"):
        number(settings, name, 0.0)
    own = {name: value for name, value in _own(settings).items() if name != "epsilon"}
    kind = settings.get("kl_kind", STEP_SETTINGS["kl_kind"])
    return AlgorithmSection.model_validate({**own, "kl": {"kind": kind}})


def _own(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that [algorithm] has, too."""
    return {name: value for name, value in settings.items() if name in SETTINGS}


def _without_default(function: Estimator, section: AlgorithmSection) -> dict[str, Any]:
    """Return [algorithm]'s settings for a user's arguments without default."""
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    return {one: getattr(section, one) for one in required if one in SETTINGS}


def _check_settings(name: str, function: Estimator, settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless every setting has an effect."""
    own = settings_accepted(function, dict.fromkeys(sorted(SETTINGS)))
    scale = settings.get("scale")
    optional = {
        "scale": scale == "batch_std" or (scale == "none" and name != "decoupled"),
        "epsilon": scale == "batch_std",
        "whiten_epsilon": settings.get("whiten", "none") != "none",
        "ema_decay": advantage_spec(function).running_mean,
        "critic_lambda": "values" in advantage_spec(function).needs,
        "kl_coefficient": name != "decoupled",
        "kl_kind": "kl_coefficient" in settings,
    }
    read = [*own, *(one for one, is_read in optional.items() if is_read and one not in own), "whiten", "signal_scale"]
    check_settings(f"advantage {name!r}", settings, read)


def _checked(advantages: Array, group: Group, name: str) -> Array:
    """Return an estimator's finite numbers, one a sample or token, float64."""
    check_advantages(advantages, group, f"advantage {name!r}")
    return advantages.astype(np.float64)


def _whole(name: str, spec: AdvantageSpec, inputs: Inputs) -> Group:
    """Return all samples as one group, with what the estimator needs."""
    rewards = inputs.sample("rewards").numpy()
    lengths = np.array(inputs.given_lengths(len(rewards)), np.int64)
    has_turns = spec.by_turn or name not in (*ADVANTAGES.built_in, "decoupled")
    present, optional = _present(lengths), ("token_rewards", "turns") if has_turns else ("token_rewards",)
    tokens = {one: inputs.optional_token(one) for one in optional}
    tokens |= {one: inputs.token(one) for one in _TOKENS if one in spec.needs}
    arrays: dict[str, Any] = {one: None if each is None else each.numpy()[present] for one, each in tokens.items()}
    return Group(
        rewards=rewards,
        lengths=lengths,
        loss_mask=inputs.mask.numpy()[present] if inputs.has_tokens else None,
        components=_components(inputs) if "components" in spec.needs else {},
        **arrays,
    )


def _components(inputs: Inputs) -> dict[str, Array]:
    given = inputs.required("components")
    if not isinstance(given, Mapping):
        msg = "input 'components' must be an object: name of a component -> its reward for each sample"
        raise TypeError(msg)
    return {name: np.asarray(part, np.float64) for name, part in given.items()}


def _with_kl(whole: Group, inputs: Inputs, step: Mapping[str, Any], *, per_token: bool) -> Group:
    """Add the KL in the reward."""
    if not step["kl_coefficient"]:
        return whole
    reference = inputs.token("reference_logprobs").numpy()[_present(whole.token_counts)]
    old = inputs.token("logprobs").numpy()[_present(whole.token_counts)]
    kind, coefficient = step["kl_kind"], step["kl_coefficient"]
    kl = kl_rewards(old, reference, kind=kind, coefficient=coefficient, mask=whole.mask)
    if per_token:
        return replace(whole, token_rewards=kl if whole.token_rewards is None else whole.token_rewards + kl)
    return replace(whole, rewards=whole.rewards + per_sample_sums(kl, whole.token_counts))


def _group(whole: Group, index: list[int], needs: Collection[str], inputs: Inputs) -> Group:
    greedy = inputs.required("greedy_rewards") if "greedy" in needs else None
    roles = inputs.optional("roles") if "role" in needs else None
    for name, of_samples in (("greedy_rewards", greedy), ("roles", roles)):
        if of_samples is not None and (not isinstance(of_samples, list) or len(of_samples) != whole.n):
            msg = f"input {name!r} must be a list with one entry for each of {whole.n} samples"
            raise ValueError(msg)
    part = whole.select(index, greedy_reward=None if greedy is None else float(greedy[index[0]]))
    return part if roles is None else replace(part, role=str(roles[index[0]]))


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
    spec: AdvantageSpec, rows: list[RowAdvantages], settings: Mapping[str, Any], step: Mapping[str, Any]
) -> list[RowAdvantages]:
    """Apply the statistics of the step, as the trainer does."""
    if spec.running_mean:
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
    present: Array = np.arange(max([1, *lengths.tolist()])) < lengths[:, None]
    return present
