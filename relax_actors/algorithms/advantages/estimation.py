"""Advantages of a row from its columns: shaping, KL in the reward, estimator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from relax_actors.algorithms import shaping
from relax_actors.algorithms.advantages.components import decoupled
from relax_actors.algorithms.advantages.groups import (
    Array,
    Estimator,
    Group,
    check_advantages,
    correct_samples,
    per_sample_sums,
    returns_tokens,
)
from relax_actors.algorithms.advantages.returns import critic_targets
from relax_actors.algorithms.named_functions import load_advantage, needs_whole_step
from relax_actors.algorithms.own_options import arguments_of
from relax_actors.algorithms.specs import AdvantageSpec, advantage_spec
from relax_actors.config import Config
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.errors import RowError
from relax_actors.messages import Advantage, FinishReason, Reward, Trajectory
from relax_actors.messages.player_parts import PlayerPart, parts_of

REFERENCE, VALUES, SQUARES = "reference", "values", "squares"
"""Columns: log-probs of the reference model, values of the critic, sums of squared probabilities."""
_TOKEN_INPUTS = frozenset({"tokens", "values", "logprobs", "squares"})


def estimator_of(algorithm: AlgorithmSection) -> tuple[Estimator, AdvantageSpec]:
    """Return the estimator of a run with its settings and options bound, and its facts.

    Raises:
        ConfigError: it does not import or is not a function, or an option of it is missing or of the wrong type.
    """
    is_decoupled = algorithm.components == "decoupled"
    function: Estimator = decoupled if is_decoupled else load_advantage(algorithm.advantage)
    return partial(function, **arguments_of(function, algorithm)), advantage_spec(function)


def needs_greedy(algorithm: AlgorithmSection) -> bool:
    """Return whether the estimator needs a greedy sample; raises as `estimator_of`."""
    return "greedy" in estimator_of(algorithm)[1].needs


class RowEstimation:
    """Computes the advantages of rows.

    Attributes:
        columns: columns that `estimate` reads besides the rewards.

    Raises:
        ConfigError: the estimator does not import, or is not a function.
    """

    def __init__(self, config: Config) -> None:
        self._algorithm, self._max_tokens = config.algorithm, config.longest_sample
        self._has_episodes = config.environment is not None
        self._has_players, self._rivals = bool(config.players), config.algorithm.rivals
        self._by_branch = config.environment is not None and config.environment.credit == "branch"
        self._function, self._spec = estimator_of(config.algorithm)
        self._in_trainer = needs_whole_step(config.algorithm)
        # Equal rewards then leave no signal but penalties of lengths or a KL, which alone keep no row.
        self._compares = config.algorithm.components == "sum" and self._spec.equal_rewards == "zero"
        if config.algorithm.components == "decoupled" and isinstance(config.reward.function, dict):
            self._function = partial(self._function, weights=config.reward.function | config.algorithm.weights)
        self.columns = self._columns()

    def _columns(self) -> tuple[str, ...]:
        algorithm, needs = self._algorithm, frozenset(self._spec.needs)
        shapes, in_reward = algorithm.shaping, algorithm.kl.place == "reward"
        by_length = shapes.overlong or shapes.length_penalty > 0 or shapes.mask_truncated
        columns = {
            "prompt": "role" in needs,
            "trajectory": bool(needs & _TOKEN_INPUTS) or in_reward or by_length or self._has_players,
            "actor_fwd": in_reward and algorithm.proximal == "actor_fwd",
            REFERENCE: in_reward,
            VALUES: "values" in needs,
            SQUARES: "squares" in needs,
        }
        return tuple(name for name, is_read in columns.items() if is_read)

    def without_signal(self, reward: Reward, columns: Mapping[str, Any]) -> str:
        """Return why a row is to be dropped before its advantages are computed; empty if it is not."""
        shapes, trained = self._algorithm.shaping, self._trained(len(reward))
        if shapes.filter_zero_variance and self._compares:
            if self._has_players:
                if not self._misfit(reward, columns) and not any(map(_differs, self._player_rewards(reward, columns))):
                    beside = ", nor any two rivals of a sample" if self._rivals else ""
                    return f"no player scored differently in any two of {trained} samples{beside}"
            elif not _differs(reward, trained):
                return f"all {trained} samples scored {reward.values[0]:g}"
        if shapes.mask_truncated:
            reasons = columns["trajectory"].finish_reasons[:trained]
            if all(reason == FinishReason.LENGTH for reason in reasons):
                return f"all {trained} samples were cut off at rollout.max_tokens and are masked"
        return ""

    def is_without_signal(self, advantage: Advantage) -> bool:
        """Return whether a row is to be dropped because all of its advantages are 0."""
        return self._algorithm.shaping.filter_zero_variance and not advantage.values.any()

    def _player_rewards(self, reward: Reward, columns: Mapping[str, Any]) -> list[Reward]:
        """Return the rewards of the players that can be compared."""
        parts = parts_of(columns["trajectory"], self._rivals)
        return [part.reward(reward) for part in parts if self._is_comparable(part, len(reward))]

    def _misfit(self, reward: Reward, columns: Mapping[str, Any]) -> str:
        """Return why a row with players cannot be compared; empty if it can."""
        if why := _misfit(reward, columns):
            return why
        acted = [name for name in self._rivals if name in columns["trajectory"].players]
        without = [name for name in acted if name not in reward.components]
        if without and not self._spec.per_token:
            return (
                f"algorithm.rivals compares players of a sample by rewards of their own, and the reward has none for "
                f"{', '.join(without)}; return a reward for each player by name"
            )
        return ""

    def _is_comparable(self, part: PlayerPart, samples: int) -> bool:
        """Whether a player acted in enough samples, and in the greedy one if it is the baseline."""
        has_baseline = "greedy" not in self._spec.needs or part.samples[-1] == samples - 1
        return has_baseline and len(part.samples) >= self._spec.min_samples

    @property
    def adapts_kl(self) -> bool:
        """Whether the KL's coefficient comes with the weights that sampled the row."""
        return self._algorithm.kl.place == "reward" and self._algorithm.kl.target is not None

    def estimate(
        self, reward: Reward, columns: Mapping[str, Any], source: str, kl_coefficient: float | None = None
    ) -> Advantage:
        """Compute the advantages of a row, or of each of its players as a row of its own.

        `kl_coefficient` is that of the KL in the reward; None for that of the configuration.

        Raises:
            RowError: a column does not fit the others, or the estimator refuses the row or returns no finite number for
                each sample or token.
        """
        if self._has_players:
            return self._of_players(reward, columns, source, kl_coefficient)
        return self._of_samples(reward, columns, source, kl_coefficient)

    def _of_players(
        self, reward: Reward, columns: Mapping[str, Any], source: str, kl_coefficient: float | None
    ) -> Advantage:
        whole: Trajectory = columns["trajectory"]
        if why := self._misfit(reward, columns):
            msg = f"{source}: {why}"
            raise RowError(msg)
        values, kls, weights = np.zeros(len(whole.token_ids)), [], []
        returns = np.zeros(len(values), np.float32) if "values" in self._spec.needs else None
        for part in parts_of(whole, self._rivals):
            if not self._is_comparable(part, len(reward)):
                continue  # nobody to compare with
            own = {
                name: column[part.tokens] for name, column in columns.items() if name not in ("prompt", "trajectory")
            }
            own = {**columns, **own, "trajectory": part.trajectory}
            own_part = self._of_samples(part.reward(reward), own, f"{source}, {part.title}", kl_coefficient)
            lengths = part.trajectory.sample_lengths
            values[part.tokens] = own_part.values if own_part.per_token else np.repeat(own_part.values, lengths)
            if returns is not None and own_part.returns is not None:
                returns[part.tokens] = own_part.returns
            if own_part.kl is not None:
                kls.append(own_part.kl)
                weights.append(self._trained(len(part.samples)))
        return Advantage(
            values if self._in_trainer else values.astype(np.float32),
            float(np.asarray(reward.values, np.float64).mean()),
            returns=returns,
            lengths=whole.sample_lengths.astype(np.int32),
            components={name: float(part.astype(np.float64).mean()) for name, part in reward.components.items()},
            kl=float(np.average(kls, weights=weights)) if kls else None,
            per_token=True,
        )

    def _of_samples(
        self, reward: Reward, columns: Mapping[str, Any], source: str, kl_coefficient: float | None
    ) -> Advantage:
        try:
            kl = self._kl(columns)
            coefficient = self._algorithm.kl.coefficient if kl_coefficient is None else kl_coefficient
            whole = self._whole_group(reward, columns, kl, coefficient)
            group = self._without_greedy(whole)
            advantages = np.asarray(self._function(group))
            check_advantages(advantages, group, f"algorithm.advantage = {self._algorithm.advantage!r}")
            per_token = returns_tokens(self._function, group, advantages)
        except ValueError as error:
            msg = f"{source}: {error}"
            raise RowError(msg) from error
        padding = int(whole.token_counts[group.n :].sum()) if per_token else whole.n - group.n
        measured = None if kl is None else float(per_sample_sums(kl, whole.token_counts)[: group.n].mean())
        values = np.append(advantages.astype(np.float64), np.zeros(padding))
        return replace(self._advantage(reward, group, values), kl=measured, per_token=per_token)

    def _trained(self, samples: int) -> int:
        """Number of samples of a row without the greedy one, which is the last."""
        return samples - 1 if "greedy" in self._spec.needs else samples

    def _whole_group(self, reward: Reward, columns: Mapping[str, Any], kl: Array | None, coefficient: float) -> Group:
        """Build the group of all samples, the greedy one included: shaped rewards with the KL."""
        needs = self._spec.needs
        trajectory: Trajectory | None = columns.get("trajectory")
        rewards, token_rewards = self._shaped(reward, trajectory), reward.token_values
        lengths = reward.lengths if trajectory is None else trajectory.sample_lengths
        if trajectory is not None and len(trajectory.texts) != len(reward):
            msg = f"there are {len(reward)} rewards for {len(trajectory.texts)} samples"
            raise ValueError(msg)
        if trajectory is not None and kl is not None:
            penalty = -coefficient * kl
            if self._spec.per_token:
                token_rewards = penalty if token_rewards is None else token_rewards + penalty
            else:
                rewards = rewards + per_sample_sums(penalty, trajectory.sample_lengths)
        return Group(
            rewards=rewards,
            lengths=lengths,
            loss_mask=None if trajectory is None else trajectory.loss_mask,
            token_rewards=token_rewards,
            values=columns.get(VALUES),
            logprobs=None if trajectory is None else trajectory.logprobs,
            squares=columns.get(SQUARES),
            turns=None if trajectory is None else self._units(trajectory),
            components=reward.components if "components" in needs else {},
            role=str(columns["prompt"].metadata.get("role", "")) if "role" in needs else "",
        )

    def _units(self, trajectory: Trajectory) -> Array:
        """Return the number of each token's turn in its sample, or of its branch."""
        return trajectory.branch_numbers if self._by_branch else trajectory.turn_numbers

    def _without_greedy(self, whole: Group) -> Group:
        trained = self._trained(whole.n)
        return whole if trained == whole.n else whole.select(range(trained), greedy_reward=float(whole.totals[-1]))

    def _shaped(self, reward: Reward, trajectory: Trajectory | None) -> Array:
        """Return the rewards of the samples with the penalties of their lengths, `[n] float64`."""
        values, shapes = np.asarray(reward.values, np.float64), self._algorithm.shaping
        if trajectory is None:
            return values
        sampled = per_sample_sums(trajectory.versions >= 0, trajectory.sample_lengths)
        shaped = values
        if shapes.overlong:
            buffer = shapes.overlong_buffer or max(1, self._max_tokens // 5)
            # The budget of an episode counts observations, too.
            lengths = trajectory.sample_lengths if self._has_episodes else sampled
            shaped = shaped + shaping.overlong_penalty(
                lengths, max_tokens=self._max_tokens, buffer=buffer, factor=shapes.overlong_factor
            )
        if shapes.length_penalty:
            trained = self._trained(len(values))
            shaped = shaped.copy()
            shaped[:trained] += shaping.length_penalty(
                values[:trained], sampled[:trained], factor=shapes.length_penalty
            )
        return shaped

    def _kl(self, columns: Mapping[str, Any]) -> Array | None:
        """Return the KL at each token before its coefficient, `[total] float64`, or None."""
        algorithm = self._algorithm
        if algorithm.kl.place != "reward":
            return None
        trajectory: Trajectory = columns["trajectory"]
        old = np.asarray(columns.get("actor_fwd", trajectory.logprobs))
        reference = np.asarray(columns[REFERENCE])
        if old.shape != trajectory.logprobs.shape or reference.shape != old.shape:
            msg = f"{len(old)} and {len(reference)} log-probs for {len(trajectory.token_ids)} tokens"
            raise ValueError(msg)
        kl, mask = algorithm.kl, trajectory.trained
        return -shaping.kl_rewards(old, reference, kind=kl.kind, coefficient=1.0, mask=mask, clamp=kl.clamp)

    def _advantage(self, reward: Reward, group: Group, values: Array) -> Advantage:
        """Build the cell of advantages that are 0 for the greedy sample."""
        n, returns = group.n, None
        if "values" in self._spec.needs and len(values) == len(group.mask):
            gamma, critic_lambda = self._algorithm.gamma, self._algorithm.critic_lambda
            returns = critic_targets(group, values, gamma=gamma, critic_lambda=critic_lambda).astype(np.float32)
        return Advantage(
            # Statistics of the step follow: they are computed in float64, and rounded once after them.
            values if self._in_trainer else values.astype(np.float32),
            float(np.asarray(reward.values[:n], np.float64).mean()),
            returns=returns,
            lengths=reward.lengths,
            components={name: float(part[:n].astype(np.float64).mean()) for name, part in reward.components.items()},
            rewards=np.append(group.totals, np.zeros(len(reward) - n)) if self._in_trainer else None,
            role=group.role,
            correct=self._correct(reward),
        )

    def _correct(self, reward: Reward) -> Array | None:
        """Return which samples are correct, `[n] bool`, if the loss imitates them."""
        if not self._algorithm.positive_nll:
            return None
        correct = correct_samples(reward.values, self._algorithm.correct_reward)
        correct[self._trained(len(correct)) :] = False
        return correct


def _differs(reward: Reward, samples: int | None = None) -> bool:
    """Return whether two samples differ in reward, or a token has its own reward."""
    tokens = reward.token_values
    return shaping.has_signal(reward.values[:samples]) or (tokens is not None and bool(tokens.any()))


def _misfit(reward: Reward, columns: Mapping[str, Any]) -> str:
    """Return why the columns of a row with players do not fit each other; empty if they do."""
    whole: Trajectory = columns["trajectory"]
    if not whole.players:
        return "the run has players, but no sequence of the trajectory names a player"
    if len(reward) != len(whole.texts):
        return f"there are {len(reward)} rewards for {len(whole.texts)} samples"
    if reward.lengths is not None and not np.array_equal(reward.lengths, whole.sample_lengths):
        return f"token_values have lengths {reward.lengths[:8].tolist()}, samples {whole.sample_lengths[:8].tolist()}"
    total = len(whole.token_ids)
    for name, column in columns.items():
        if name not in ("prompt", "trajectory") and np.shape(column) != (total,):
            return f"column {name} has shape {list(np.shape(column))}; the trajectory has {total} tokens"
    return ""
