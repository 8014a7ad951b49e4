"""Role `reward`: scores the samples of a trajectory with a reward function, in its own process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from broker.store import Store
from relax_actors.config import Config
from relax_actors.data.checked_run import CheckedRun
from relax_actors.errors import ConfigError, RowError
from relax_actors.messages import FinishReason, Prompt, Reward, Trajectory
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.rewards.credit import environment_reward
from relax_actors.rewards.score import Score, Total
from relax_actors.rewards.scorer import RewardScorer, check_options, check_sandboxed, token_rewards
from relax_actors.runtime import Role, Row
from relax_actors.runtime.role import More, Results
from relax_actors.simulation.devices import REWARD, Devices


def with_files(prompt: Prompt, store: Store) -> Prompt:
    """Return a prompt whose media are files that a reward function can open.

    Raises:
        StoreError: a path leaves the store.
    """
    if not prompt.media:
        return prompt
    media = [replace(m, path=str(store.path(m.path)), stored=False) if m.stored else m for m in prompt.media]
    return replace(prompt, media=media)


REWARD_MODEL = "reward_model"
"""Role and column of a reward model that the run serves."""
WAIT_SECONDS = 1.0
"""Longest wait for a call before progress is reported."""


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
        settings = [config.reward.function, *([config.eval.reward] if config.eval else [])]
        names = [name for setting in settings for name in ([setting] if isinstance(setting, str) else setting)]
        check_options(config.reward.options, names)
        if config.reward.isolation == "sandbox":
            check_sandboxed(names)
        else:
            scorers = {"reward.function": config.reward.function}
            scorers |= {} if config.eval is None else {"eval.reward": config.eval.reward}
            for setting, name in scorers.items():
                scorer = RewardScorer(name, setting, config.reward.options)
                if scorer.reads_model_scores and REWARD_MODEL not in config.roles:
                    msg = (
                        f"{setting} reads the scores of a reward model, and the run serves none; add "
                        '[roles.reward_model] with model = "<folder>"'
                    )
                    raise ConfigError(msg)
        yield from ()

    def inputs(self, config: Config) -> tuple[str, ...]:
        """Return the columns to read: prompt and trajectory, and the scores of a reward model if the run serves one."""
        return (*self.reads, REWARD_MODEL) if REWARD_MODEL in config.roles else self.reads

    def setup(self) -> None:
        """Load the reward functions."""
        config = self.context.config
        section = config.reward
        self._train = RewardScorer(
            section.function, "reward.function", section.options, section.deadline, self.progress
        )
        self._devices = None if config.simulate is None else Devices(config.simulate, self.context.folder.root)
        self._eval = self._train
        if config.eval and config.eval.reward != section.function:
            self._eval = RewardScorer(
                config.eval.reward, "eval.reward", section.options, section.deadline, self.progress
            )
        self._runner = asyncio.Runner()

    def close(self) -> None:
        """Release what the reward functions hold."""
        for scorer in {self._train, self._eval}:
            self._runner.run(scorer.aclose())
        self._runner.close()

    def metrics(self) -> dict[str, float]:
        """Mean seconds that each reward function takes for a row."""
        return self._eval.metrics() | self._train.metrics()

    def handle(self, row: Row) -> Reward:
        """Score a row with functions that are not async."""
        call = self.score(row)
        try:
            call.send(None)
        except StopIteration as ended:
            reward: Reward = ended.value
            return reward
        msg = "a reward function that is not async has waited"
        raise TypeError(msg)

    def stream(self, rows: Sequence[Row], more: More) -> Iterator[Results]:
        """Score rows, those that wait for async functions at the same time."""
        if not (self._train.is_async or self._eval.is_async):
            yield from super().stream(rows, more)
            return
        loop = self._runner.get_loop()
        waiting = {loop.create_task(self.score(row)): row for row in rows}
        try:
            while waiting:
                # A call has a deadline of its own, so waiting for it is no hang.
                self.progress()
                done, _ = loop.run_until_complete(
                    asyncio.wait(waiting, timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                )
                if done:
                    yield [(waiting.pop(task), task.exception() or task.result()) for task in done]
                rows = more(self.row_limit() - len(waiting))
                waiting |= {loop.create_task(self.score(row)): row for row in rows}
        finally:
            for task in waiting:
                task.cancel()
            if waiting:
                loop.run_until_complete(asyncio.wait(waiting))

    async def score(self, row: Row) -> Reward:
        """Score each sample; with a table of functions, each function is a component.

        A sample whose environment or agent failed has reward 0, and the functions do not see it.

        Raises:
            RowError: a function did not return a finite number or score for each sample.
        """
        scorer = self._eval if row.is_eval else self._train
        if self._devices is not None:
            self._devices.elapse_phase(REWARD, row.prompt.seed, self.progress)
        config, trajectory = self.context.config, row.trajectory
        section = None if row.is_eval or config.reward.function != "environment" else config.playing
        credit, discount = config.credit
        if section is not None and (section.players or credit != "episode"):
            return environment_reward(trajectory, credit, discount, section.trained_players)
        prompt = with_files(row.prompt, self.context.table.store)
        samples = trajectory.samples if scorer.reads_samples else None
        judged = model_scores(row.column(REWARD_MODEL), trajectory) if scorer.reads_model_scores else None
        whole = [i for i, reason in enumerate(trajectory.finish_reasons) if reason != FinishReason.ERROR]
        texts, chosen = [trajectory.texts[i] for i in whole], None if samples is None else [samples[i] for i in whole]
        of_model = None if judged is None else [judged[i] for i in whole]
        scored = await scorer.score(texts, prompt, chosen, of_model) if whole else []
        names = scored[0].components if scored else dict.fromkeys(() if row.is_eval else config.reward_components)
        totals = [Total(0.0, dict.fromkeys(names, 0.0))] * len(trajectory.texts)
        for i, total in zip(whole, scored, strict=True):
            totals[i] = total
        return _reward_of(totals, trajectory.sample_lengths)


def model_scores(column: object, trajectory: Trajectory) -> list[Score]:
    """Return what a reward model says of each sample.

    Raises:
        RowError: the column holds no reward of each sample.
    """
    if not isinstance(column, Reward) or len(column) != len(trajectory.texts):
        msg = f"column {REWARD_MODEL} holds no score of each of {len(trajectory.texts)} samples"
        raise RowError(msg)
    if column.token_values is None or column.lengths is None:
        return [Score(value) for value in column]
    ends = np.cumsum(column.lengths).tolist()
    parts = [column.token_values[end - n : end] for end, n in zip(ends, column.lengths.tolist(), strict=True)]
    return [Score(value, tokens=tokens) for value, tokens in zip(column, parts, strict=True)]


def _reward_of(totals: Sequence[Total], lengths: np.ndarray) -> Reward:
    """Return the column of a row.

    Raises:
        RowError: samples have other components than the first one, or rewards of another number of tokens.
    """
    names = totals[0].components
    if odd := next((total.components for total in totals if total.components.keys() != names.keys()), None):
        msg = f"a reward gives components {sorted(names)} for one sample and {sorted(odd)} for another"
        raise RowError(msg)
    by_name = {name: np.array([total.components[name] for total in totals], np.float32) for name in names}
    values = np.array([total.reward for total in totals], np.float32)
    tokens = token_rewards(totals, lengths.tolist())
    return Reward(values, by_name, tokens, None if tokens is None else lengths.astype(np.int32))
