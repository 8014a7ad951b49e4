"""Reward: scores the samples of a trajectory with a function of the user's, in a process of its own."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from relax_actors.messages import Reward
from relax_actors.rewards import RewardFunction, checked, load_reward, load_rewards
from relax_actors.runtime import Role, Row
from relax_actors.simulation.devices import REWARD, Devices


def reward_function(setting: str | dict[str, float]) -> RewardFunction:
    """The function that a setting names.

    Raises:
        ConfigError: it does not import.
    """
    return load_rewards(setting) if isinstance(setting, dict) else load_reward(setting)


class RewardRole(Role):
    """Training rows by `reward.function`, held-out rows by `eval.reward`."""

    reads: ClassVar = ("prompt", "trajectory")
    writes: ClassVar = "reward"
    kinds: ClassVar = ("group", "eval")
    max_concurrent_rows: ClassVar = 16

    def setup(self) -> None:
        """Load the functions."""
        config = self.context.config
        self._train = reward_function(config.reward.function)
        self._devices = None if config.simulate is None else Devices(config.simulate, self.context.folder.root)
        self._eval = reward_function(config.eval.reward) if config.eval else self._train

    def handle(self, row: Row) -> Reward:
        """Score each sample."""
        function = self._eval if row.is_eval else self._train
        name = getattr(function, "__name__", "reward")
        if self._devices is not None:
            self._devices.spend_phase(REWARD, row.prompt.seed, self.progress)
        values = []
        for text in row.trajectory.texts:
            values.append(checked(function(text, row.prompt), name))
            self.progress()
        return Reward(np.asarray(values, np.float32))
