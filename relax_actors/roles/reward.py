"""Role `reward`: scores the samples of a trajectory with a reward function, in its own process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np

from broker.store import Store
from relax_actors.data.checked_run import CheckedRun
from relax_actors.messages import FinishReason, Prompt, Reward, Sample
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.rewards import RewardFunction, checked, load_reward, load_rewards
from relax_actors.rewards.credit import environment_reward
from relax_actors.rewards.loading import call_reward, takes_sample
from relax_actors.runtime import Role, Row
from relax_actors.simulation.devices import REWARD, Devices


class RewardScorer:
    """One reward function, or a weighted sum of several, whose scores are kept as components.

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

    @property
    def reads_samples(self) -> bool:
        """Whether a function reads more of a sample than its text."""
        return any(map(takes_sample, self._functions.values()))

    @property
    def nothing(self) -> tuple[float, dict[str, float]]:
        """Reward and scores of a sample that failed."""
        return 0.0, dict.fromkeys(self._weights or (), 0.0)

    def score(self, text: str, prompt: Prompt, sample: Sample | None = None) -> tuple[float, dict[str, float]]:
        """Return the reward of a completion, and the score of each function of a table by its name.

        `sample` is needed if `reads_samples`.

        Raises:
            RowError: a function did not return a finite number.
        """
        parts = {
            path: checked(call_reward(function, text, prompt, sample), path)
            for path, function in self._functions.items()
        }
        if self._weights is None:
            return next(iter(parts.values())), {}
        return sum(self._weights[path] * value for path, value in parts.items()), parts


def with_files(prompt: Prompt, store: Store) -> Prompt:
    """Return a prompt whose media are files that a reward function can open.

    Raises:
        StoreError: a path leaves the store.
    """
    if not prompt.media:
        return prompt
    media = [replace(m, path=str(store.path(m.path)), stored=False) if m.stored else m for m in prompt.media]
    return replace(prompt, media=media)


class RewardRole(Role):
    """Scores training rows by `reward.function` and held-out rows by `eval.reward`."""

    reads: ClassVar = ("prompt", "trajectory")
    writes: ClassVar = "reward"
    kinds: ClassVar = ("group", "eval")
    max_concurrent_rows: ClassVar = 16
    spec: ClassVar = RoleSpec(section="reward", rows="sampled", start_order=10)

    def check(self, run: CheckedRun) -> Iterator[str]:
        """Check that the reward functions import; those for a sandbox are imported in it only."""
        config = run.config
        if config.reward.isolation == "none":
            RewardScorer(config.reward.function, "reward.function")
            if config.eval is not None:
                RewardScorer(config.eval.reward, "eval.reward")
        yield from ()

    def setup(self) -> None:
        """Load the reward functions."""
        config = self.context.config
        self._train = RewardScorer(config.reward.function, "reward.function")
        self._devices = None if config.simulate is None else Devices(config.simulate, self.context.folder.root)
        self._eval = RewardScorer(config.eval.reward, "eval.reward") if config.eval else self._train

    def handle(self, row: Row) -> Reward:
        """Score each sample; with a table of functions, each function is a component.

        A sample whose environment or agent failed has reward 0.

        Raises:
            RowError: a function did not return a finite number.
        """
        scorer = self._eval if row.is_eval else self._train
        if self._devices is not None:
            self._devices.elapse_phase(REWARD, row.prompt.seed, self.progress)
        config = self.context.config
        section = None if row.is_eval or config.reward.function != "environment" else config.playing
        credit, discount = config.credit
        if section is not None and (section.players or credit != "episode"):
            return environment_reward(row.trajectory, credit, discount, section.trained_players)
        prompt = with_files(row.prompt, self.context.table.store)
        texts, values, components = row.trajectory.texts, [], []
        samples = row.trajectory.samples if scorer.reads_samples else [None] * len(texts)
        for text, sample, reason in zip(texts, samples, row.trajectory.finish_reasons, strict=True):
            failed = reason == FinishReason.ERROR
            value, parts = scorer.nothing if failed else scorer.score(text, prompt, sample)
            values.append(value)
            components.append(parts)
            self.progress()
        names = components[0] if components else {}
        by_name = {name: np.array([parts[name] for parts in components], np.float32) for name in names}
        return Reward(np.asarray(values, np.float32), by_name)
