"""Input of advantage estimators: the samples of one prompt.

An estimator is a pure function `f(group, **settings)` that returns one advantage for each sample, `[n] float64`, or for
each token, `[total] float64`; an `AdvantageSpec`, as its decorator, declares what it needs. A keyword-only parameter
that has the name of a setting of [algorithm] gets its value.
The role `advantages` rounds the result to float32 once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Estimator: TypeAlias = Callable[..., Array]
_FULL = ("token_rewards", "values", "logprobs", "squares", "turns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Samples of one prompt; `total` counts the own tokens of all, concatenated.

    Attributes:
        rewards: `[n] float64`, one for each sample.
        lengths: `[n] int64`, tokens of each sample; a sample may have none.
        loss_mask: `[total] bool`, true for trained tokens; None if all are trained.
        token_rewards: `[total] float64`, rewards of single tokens, added to those of the samples.
        values: `[total] float64`, of the critic.
        logprobs: `[total] float64`, that the tokens were sampled with.
        squares: `[total] float64`, sum of the squared probabilities of the whole vocabulary at each token.
        turns: `[total] float64`, number of the turn of each token in its sample, from 0; see `turn_numbers`.
        components: name -> `[n] float64`, parts of the rewards.
        greedy_reward: reward of the greedy sample, which is not among the n samples.
        role: name of the role that the samples play, from the prompt's metadata.

    Raises:
        ValueError: there are no rewards, a number is not finite, or shapes do not match.
    """

    rewards: Array
    lengths: Array | None = None
    loss_mask: Array | None = None
    token_rewards: Array | None = None
    values: Array | None = None
    logprobs: Array | None = None
    squares: Array | None = None
    turns: Array | None = None
    components: Mapping[str, Array] = field(default_factory=dict)
    greedy_reward: float | None = None
    role: str = ""

    def __post_init__(self) -> None:
        rewards = np.asarray(self.rewards, np.float64)
        object.__setattr__(self, "rewards", rewards)
        if rewards.ndim != 1 or not len(rewards):
            msg = f"rewards have shape {list(rewards.shape)}; pass one number for each sample of the group"
            raise ValueError(msg)
        if not np.isfinite(rewards).all():
            index = int(np.flatnonzero(~np.isfinite(rewards))[0])
            msg = f"reward {index} of {len(rewards)} is {rewards[index]}; the reward role must return finite numbers"
            raise ValueError(msg)
        if self.greedy_reward is not None and not np.isfinite(self.greedy_reward):
            msg = f"the reward of the greedy sample is {self.greedy_reward}; it must be finite"
            raise ValueError(msg)
        self._check_components()
        self._check_tokens()

    def _check_components(self) -> None:
        components = {name: np.asarray(part, np.float64) for name, part in self.components.items()}
        object.__setattr__(self, "components", components)
        for name, part in components.items():
            if part.shape != self.rewards.shape or not np.isfinite(part).all():
                msg = f"component {name!r} has shape {list(part.shape)} or is not finite; give {self.n} finite numbers"
                raise ValueError(msg)

    def _check_tokens(self) -> None:
        arrays = {name: getattr(self, name) for name in (*_FULL, "loss_mask")}
        given = {name: np.asarray(array) for name, array in arrays.items() if array is not None}
        if self.lengths is None:
            if given:
                msg = f"a group has {', '.join(given)}, but no lengths; give the number of tokens of each sample"
                raise ValueError(msg)
            return
        lengths = np.asarray(self.lengths, np.int64)
        object.__setattr__(self, "lengths", lengths)
        if lengths.shape != self.rewards.shape or (lengths < 0).any():
            msg = f"lengths {lengths[:8].tolist()} do not give each of {self.n} samples a number of tokens"
            raise ValueError(msg)
        total = int(lengths.sum())
        for name, array in given.items():
            values = array.astype(np.bool_ if name == "loss_mask" else np.float64)
            object.__setattr__(self, name, values)
            if values.shape != (total,) or not np.isfinite(values).all():
                msg = f"{name} have shape {list(values.shape)} or are not finite; give {total} numbers, one per token"
                raise ValueError(msg)

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.rewards)

    @property
    def has_token_rewards(self) -> bool:
        """Whether any token has a reward other than 0."""
        return self.token_rewards is not None and bool(self.token_rewards.any())

    @property
    def totals(self) -> Array:
        """Reward of each sample and its tokens together, `[n] float64`."""
        if self.token_rewards is None or not self.has_token_rewards:
            return self.rewards
        return self.rewards + per_sample_sums(self.token_rewards, self.token_counts)

    @property
    def token_counts(self) -> Array:
        """Number of tokens of each sample, `[n] int64`; raises ValueError if unknown."""
        if self.lengths is None:
            msg = "a group has no lengths, which the estimator reads; declare that it needs 'tokens'"
            raise ValueError(msg)
        return self.lengths

    @property
    def mask(self) -> Array:
        """True for trained tokens, `[total] bool`."""
        return np.ones(int(self.token_counts.sum()), np.bool_) if self.loss_mask is None else self.loss_mask

    @property
    def trained_lengths(self) -> Array:
        """Number of trained tokens of each sample, `[n] int64`."""
        return per_sample_sums(self.mask, self.token_counts).astype(np.int64)

    @property
    def turn_numbers(self) -> Array:
        """Number of each token's turn in its sample, `[total] int64`; 0 without `turns`."""
        return np.zeros(len(self.mask), np.int64) if self.turns is None else self.turns.astype(np.int64)

    def input(self, name: str) -> Array:
        """Return a per-token array; raises ValueError if the group has none."""
        array = getattr(self, name)
        if array is None:
            msg = f"a group has no {name}, which the estimator reads; declare that it needs {name!r}"
            raise ValueError(msg)
        values: Array = array
        return values

    def spread(self, values: Array) -> Array:
        """Repeat values of samples `[n]` over their tokens, `[total]`."""
        return np.repeat(values, self.token_counts)

    def select(self, samples: Sequence[int], *, greedy_reward: float | None = None) -> Group:
        """Return a group of samples by index; None keeps the greedy sample's reward."""
        index = np.asarray(samples)
        tokens: Array | None = None
        if self.lengths is not None:
            parts = sample_slices(self.lengths)
            tokens = np.concatenate([np.arange(parts[i].start, parts[i].stop) for i in index])
        cut = {
            name: None if (array := getattr(self, name)) is None else array[tokens] for name in (*_FULL, "loss_mask")
        }
        return Group(
            rewards=self.rewards[index],
            lengths=None if self.lengths is None else self.lengths[index],
            components={name: part[index] for name, part in self.components.items()},
            greedy_reward=self.greedy_reward if greedy_reward is None else greedy_reward,
            role=self.role,
            **cut,
        )


def check_advantages(advantages: Array, group: Group, source: str) -> None:
    """Raise ValueError unless there is one finite number for each sample or token."""
    total = None if group.lengths is None else int(group.lengths.sum())
    if advantages.ndim != 1 or advantages.dtype.kind not in "fiu" or len(advantages) not in (group.n, total):
        tokens = "" if total is None else f" or [{total}], one per token"
        msg = (
            f"{source} returned {advantages.dtype}{list(advantages.shape)}; it must return [{group.n}], "
            f"one number per sample{tokens}"
        )
        raise ValueError(msg)
    if not np.isfinite(advantages).all():
        index = int(np.flatnonzero(~np.isfinite(advantages))[0])
        where = f"at index {index} of {len(advantages)}"
        msg = f"{source} returned {advantages[index]} {where}; it must return finite numbers"
        raise ValueError(msg)


def returns_tokens(function: Estimator, group: Group, advantages: Array) -> bool:
    """Return whether an estimator gave one number for each token of a group."""
    if group.lengths is None or len(advantages) != int(group.lengths.sum()):
        return False
    if len(advantages) != group.n:
        return True
    other = np.flatnonzero(group.lengths != 1)
    if not len(other):
        return False
    # As many tokens as samples: with one of the samples twice, the numbers differ.
    larger = group.select([*range(group.n), int(other[0])])
    return len(function(larger)) != larger.n


def per_sample_sums(per_token: Array, lengths: Array) -> Array:
    """Sum the tokens of each sample, `[n] float64`; 0 for a sample without tokens."""
    return np.bincount(_sample_of_token(lengths), weights=per_token, minlength=len(lengths))


def correct_samples(rewards: Array, correct_reward: float) -> Array:
    """Return which samples are correct, `[n] bool`: their reward is `correct_reward` or more.

    Compared in float32, the precision of rewards: 0.9 in float32 is below 0.9 in float64.
    """
    return np.asarray(rewards, np.float32) >= np.float32(correct_reward)


def sample_slices(lengths: Array) -> list[slice]:
    """Return the position of each sample among the tokens of its group."""
    ends = np.cumsum(lengths).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths.tolist(), strict=True)]


def _sample_of_token(lengths: Array) -> Array:
    return np.repeat(np.arange(len(lengths)), lengths)
