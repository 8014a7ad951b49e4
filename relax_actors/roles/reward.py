"""Role `reward`: scores samples with a reward function, in its own process.

A reward may also name roles, whose columns hold scores: see `relax_actors.roles.reward_columns`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from broker.store import Store
from relax_actors.config import Config
from relax_actors.data.checked_run import CheckedRun
from relax_actors.errors import RowError
from relax_actors.messages import FinishReason, Prompt, Reward
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.rewards.credit import environment_reward
from relax_actors.rewards.score import Total
from relax_actors.rewards.scorer import RewardScorer, check_options, check_sandboxed, token_rewards
from relax_actors.roles.reward_columns import check_reward_roles, columns_of, names_of, rewards_of, scores_of
from relax_actors.runtime import Role, Row
from relax_actors.runtime.role import More, Results
from relax_actors.simulation.devices import REWARD, Devices


def with_files(prompt: Prompt, store: Store) -> Prompt:
    """Return a prompt whose media are files; raises StoreError for paths outside."""
    if not prompt.media:
        return prompt
    media = [replace(m, path=str(store.path(m.path)), stored=False) if m.stored else m for m in prompt.media]
    return replace(prompt, media=media)


WAIT_SECONDS = 1.0
"""Longest wait for a call before progress is reported."""


class RewardRole(Role):
    """Scores training rows by `reward.function`, held-out rows by their set of [eval]."""

    reads: ClassVar = ("prompt", "trajectory")
    writes: ClassVar = "reward"
    kinds: ClassVar = ("group", "eval")
    max_concurrent_rows: ClassVar = 16
    spec: ClassVar = RoleSpec(section="reward", rows="sampled", start_order=10)

    def check(self, run: CheckedRun) -> Iterator[str]:
        """Check that the reward functions import; those for a sandbox are imported in it only."""
        config = run.config
        check_reward_roles(config)
        columns, rewards = columns_of(config), rewards_of(config)
        names = {name for setting in rewards.values() for name in names_of(setting)} - columns.keys()
        check_options(config.reward.options, sorted(names))
        if config.reward.isolation == "sandbox":
            check_sandboxed(sorted(names))
        else:
            for where, setting in rewards.items():
                RewardScorer(setting, where, config.reward.options, columns=columns)
        yield from ()

    def inputs(self, config: Config) -> tuple[str, ...]:
        """Return the columns to read: `reads`, and those of the roles that the rewards name."""
        return (*self.reads, *columns_of(config).values())

    def setup(self) -> None:
        """Load the reward functions."""
        config = self.context.config
        section, self._columns = config.reward, columns_of(config)
        # By setting: sets of held-out rows with equal settings share what their functions hold.
        self._scorers: dict[str, RewardScorer] = {}
        for where, setting in rewards_of(config).items():
            if (key := repr(setting)) not in self._scorers:
                self._scorers[key] = RewardScorer(
                    setting, where, section.options, section.deadline, self.progress, self._columns
                )
        self._devices = None if config.simulate is None else Devices(config.simulate, self.context.folder.root)
        self._runner = asyncio.Runner()

    def close(self) -> None:
        """Release what the reward functions hold."""
        for scorer in self._scorers.values():
            self._runner.run(scorer.aclose())
        self._runner.close()

    def metrics(self) -> dict[str, float]:
        """Mean seconds that each reward function takes for a row."""
        scorers = reversed(self._scorers.values())  # where names are the same, those of training rows count
        return {name: seconds for scorer in scorers for name, seconds in scorer.metrics().items()}

    def _scorer(self, row: Row) -> RewardScorer:
        """Return the scorer of a row; raises RowError if no set of [eval] has it."""
        own = self.context.config.held_out(row.id)
        return self._scorers[repr(self.context.config.reward.function if own is None else own.reward)]

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
        if not any(scorer.is_async for scorer in self._scorers.values()):
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
        scorer = self._scorer(row)
        if self._devices is not None:
            self._devices.elapse_phase(REWARD, row.prompt.seed, self.progress)
        config, trajectory = self.context.config, row.trajectory
        section = None if row.is_eval or config.reward.function != "environment" else config.playing
        credit, discount = config.credit
        if section is not None and (section.players or credit != "episode"):
            return environment_reward(trajectory, credit, discount, section.trained_players)
        prompt = with_files(row.prompt, self.context.table.store)
        samples = trajectory.samples if scorer.reads_samples else None
        whole = [i for i, reason in enumerate(trajectory.finish_reasons) if reason != FinishReason.ERROR]
        texts, chosen = [trajectory.texts[i] for i in whole], None if samples is None else [samples[i] for i in whole]
        columns = {
            name: scores_of(row.column(self._columns[name]), len(trajectory.texts), name) for name in scorer.columns
        }
        columns = {name: [scores[i] for i in whole] for name, scores in columns.items()}
        scored = await scorer.score(texts, prompt, chosen, columns) if whole else []
        names = scored[0].components if scored else dict.fromkeys(() if row.is_eval else config.reward_components)
        totals = [Total(0.0, dict.fromkeys(names, 0.0))] * len(trajectory.texts)
        for i, total in zip(whole, scored, strict=True):
            totals[i] = total
        return _reward_of(totals, trajectory.sample_lengths)


def _reward_of(totals: Sequence[Total], lengths: np.ndarray) -> Reward:
    """Return the column of a row; raises RowError for wrong components or tokens."""
    names = totals[0].components
    if odd := next((total.components for total in totals if total.components.keys() != names.keys()), None):
        msg = f"a reward gives components {sorted(names)} for one sample and {sorted(odd)} for another"
        raise RowError(msg)
    by_name = {name: np.array([total.components[name] for total in totals], np.float32) for name in names}
    values = np.array([total.reward for total in totals], np.float32)
    tokens = token_rewards(totals, lengths.tolist())
    return Reward(values, by_name, tokens, None if tokens is None else lengths.astype(np.int32))
