"""Role `held_out`: scores held-out rows of the data, in place of generation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any, ClassVar

import numpy as np

from relax_actors.messages import Reward, Trajectory
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.roles.scorer import Scorer
from relax_actors.runtime import Row


class HeldOut(Scorer):
    """Scores held-out examples and pairs with exactly the version that they evaluate.

    The reward of an example is the mean log-prob of its trained tokens, the negative loss. That of a pair is 1 if a
    token of the chosen answer is more likely than one of the rejected answer, on average, and else 0.
    """

    writes: ClassVar = "reward"
    kinds: ClassVar = ("eval",)
    spec: ClassVar = RoleSpec(device=True, section="examples", requires="eval", rows="data", start_order=73)
    follows_weights: ClassVar = False

    _version = 0

    def handle_many(self, rows: Sequence[Row]) -> list[Any]:
        """Score rows version by version."""
        results: list[Any] = []
        for version, same in groupby(rows, key=lambda row: row.id.step):
            self._version = version
            results += super().handle_many(list(same))
        return results

    def use_weights(self, newest_sampled: int) -> None:  # noqa: ARG002 no policy sampled the rows
        """Load the version of the rows."""
        self._stager.use_version(self._version)

    def values(self, trajectories: Sequence[Trajectory], scored: Sequence[Any]) -> list[Reward]:
        """Return the reward of each row from the log-probs of its tokens."""
        return [
            reward_of(trajectory, logprobs)
            for trajectory, logprobs in zip(trajectories, super().values(trajectories, scored), strict=True)
        ]


def reward_of(trajectory: Trajectory, logprobs: Any) -> Reward:
    """Return the reward of an example or a pair from log-probs, `[total] float32`."""
    bounds = np.concatenate([[0], np.cumsum(trajectory.sample_lengths)])
    means = [float(logprobs[slice(*part)][trajectory.trained[slice(*part)]].mean()) for part in pairwise(bounds)]
    if len(means) > 1:
        means = [float(means[0] > means[1])] * len(means)
    return Reward(np.array(means, np.float32))
