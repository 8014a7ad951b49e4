"""Role `reward`: scores the samples of a trajectory with a function, in a process of its own."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from relax_actors.messages import Prompt, Reward
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.rewards import RewardFunction, checked, load_reward, load_rewards
from relax_actors.runtime import Role, Row
from relax_actors.simulation.devices import REWARD, Devices


class Scorer:
    """One reward function, or a weighted sum of several whose single scores are kept as components.

    Args:
        setting: name or dotted path of a function, or a table of them with weights.
        name: key of the setting, for errors.

    Raises:
        ConfigError: a function does not import, or a weight is not a finite number.
    """

    def __init__(self, setting: str | dict[str, float], name: str) -> None:
        self._weights = setting if isinstance(setting, dict) else None
        if isinstance(setting, dict):
            load_rewards(setting, name)
        paths = [setting] if isinstance(setting, str) else list(setting)
        self._functions: dict[str, RewardFunction] = {path: load_reward(path, name) for path in paths}

    def score(self, text: str, prompt: Prompt) -> tuple[float, dict[str, float]]:
        """Return a completion's reward and its components.

        Raises:
            RowError: a function returned something else than a finite number.
        """
        parts = {path: checked(function(text, prompt), path) for path, function in self._functions.items()}
        if self._weights is None:
            return next(iter(parts.values())), {}
        return sum(self._weights[path] * value for path, value in parts.items()), parts


class RewardRole(Role):
    """Scores training rows by `reward.function` and held-out rows by `eval.reward`."""

    reads: ClassVar = ("prompt", "trajectory")
    writes: ClassVar = "reward"
    kinds: ClassVar = ("group", "eval")
    max_concurrent_rows: ClassVar = 16
    spec: ClassVar = RoleSpec(section="reward", start_order=10)

    def setup(self) -> None:
        """Load the functions."""
        config = self.context.config
        self._train = Scorer(config.reward.function, "reward.function")
        self._devices = None if config.simulate is None else Devices(config.simulate, self.context.folder.root)
        self._eval = Scorer(config.eval.reward, "eval.reward") if config.eval else self._train

    def handle(self, row: Row) -> Reward:
        """Score each sample; a table of functions gives one component for each.

        Raises:
            RowError: a function returned something else than a finite number.
        """
        scorer = self._eval if row.is_eval else self._train
        if self._devices is not None:
            self._devices.elapse_phase(REWARD, row.prompt.seed, self.progress)
        values, components = [], []
        for text in row.trajectory.texts:
            value, parts = scorer.score(text, row.prompt)
            values.append(value)
            components.append(parts)
            self.progress()
        names = components[0] if components else {}
        by_name = {name: np.array([parts[name] for parts in components], np.float32) for name in names}
        return Reward(np.asarray(values, np.float32), by_name)
