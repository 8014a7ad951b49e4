"""Scores of other roles as parts of a reward: `{ judge = 0.8 }` names the role `judge`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from relax_actors.config import Config
from relax_actors.errors import ConfigError, RowError
from relax_actors.messages import Reward
from relax_actors.registry.catalog import REWARDS, ROLES
from relax_actors.rewards.score import Score
from relax_actors.roles.registry import role_class
from relax_actors.runtime import Role, StatefulRole

TRAINING = "reward.function"
"""Setting of the reward of training rows."""


def rewards_of(config: Config) -> dict[str, str | dict[str, float]]:
    """Return the rewards of a run by setting: training rows, and sets of held-out rows."""
    held_out = {f"{where}.reward": each.reward for where, each in config.held_out_sets.items()}
    return {TRAINING: config.reward.function} | held_out


def names_of(setting: str | dict[str, float]) -> tuple[str, ...]:
    """Return the names in a reward."""
    return (setting,) if isinstance(setting, str) else tuple(setting)


def names_in_rewards(config: Config) -> dict[str, tuple[str, ...]]:
    """Return the names in rewards of training ("group") and held-out ("eval") rows."""
    rewards = rewards_of(config)
    training = names_of(rewards.pop(TRAINING))
    held_out = dict.fromkeys(name for setting in rewards.values() for name in names_of(setting))
    return {"group": training} | ({"eval": tuple(held_out)} if rewards else {})


def kinds_read(config: Config, name: str, role: Role) -> set[str]:
    """Return the kinds of rows for which a role computes scores: those whose rewards name it.

    They are all kinds that it handles if no reward names it, or if the column may have another reader.
    """
    named = {kind for kind, names in names_in_rewards(config).items() if name in names}
    has_readers = len(config.roles) > 1 or config.advantages.reads == role.writes
    return {*role.kinds} if has_readers or not named else named


def columns_of(config: Config) -> dict[str, str]:
    """Return the column of each role that a reward names; imports their classes."""
    named = {name: None for names in names_in_rewards(config).values() for name in names if name in config.roles}
    return {name: role_class(config, name).writes for name in named}


def check_reward_roles(config: Config) -> None:
    """Check the roles that rewards name.

    Raises:
        ConfigError: one writes no column, owns state, needs the reward itself, does not handle the rows, or has
            options of a function.
    """
    for setting, reward in rewards_of(config).items():
        kind, names = "group" if setting == TRAINING else "eval", names_of(reward)
        for name in (name for name in names if name in ROLES and name not in REWARDS and name not in config.roles):
            msg = f"{setting} names the role {name}, which the run does not have; add the section [roles.{name}]"
            raise ConfigError(msg)
        for name in (name for name in names if name in config.roles):
            cls, where = role_class(config, name), f"{setting} names the role {name}"
            if not cls.writes or issubclass(cls, StatefulRole):
                msg = f"{where}, which writes no column of scores; name a pool role that does, or a function"
                raise ConfigError(msg)
            if "reward" in cls.reads:
                msg = f"{where}, which reads the reward itself; set advantages.reads = {cls.writes!r} to use its column"
                raise ConfigError(msg)
            if kind not in cls.kinds:
                msg = f"{where}, which handles rows of kind {', '.join(cls.kinds)} only; add {kind!r} to its `kinds`"
                raise ConfigError(msg)
            if name in config.reward.options:
                msg = (
                    f"reward.options.{name} has no effect: {name} is the role of [roles.{name}]; set its options there"
                )
                raise ConfigError(msg)


def scores_of(value: Any, samples: int, name: str) -> list[float | Score]:
    """Return the scores of a column, one a sample; raises RowError for bad ones."""
    if isinstance(value, Reward):
        scores: list[float | Score] = list(_scores(value))
    else:
        try:
            numbers = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            numbers = np.zeros((0, 0))
        scores = numbers.tolist() if numbers.ndim == 1 else []
    if len(scores) != samples:
        msg = (
            f"the column of the role {name} holds {value!r:.200} for {samples} samples; it must hold one score for each"
        )
        raise RowError(msg)
    return scores


def _scores(reward: Reward) -> list[Score]:
    tokens: list[Any] = [None] * len(reward)
    if reward.token_values is not None and reward.lengths is not None:
        tokens = np.split(reward.token_values, np.cumsum(reward.lengths)[:-1])
    parts: list[Mapping[str, float]] = [
        {name: float(values[i]) for name, values in reward.components.items()} for i in range(len(reward))
    ]
    return [Score(value, part, own) for value, part, own in zip(reward, parts, tokens, strict=True)]
