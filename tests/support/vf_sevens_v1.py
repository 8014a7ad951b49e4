"""Taskset of `verifiers.v1`: two turns, whose reward is the share of sevens in the answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["Sevens", "SevensEnv"]


class SevensTask(vf.Task[vf.TaskData]):
    """Counts sevens."""

    @vf.reward
    async def share(self, trace: Any) -> float:
        whole = "".join(message.content or "" for message in trace.assistant_messages)
        return whole.count("7") / max(1, len(whole))

    @vf.metric
    async def turns(self, trace: Any) -> float:
        return float(trace.num_turns)


class Sevens(vf.Taskset[SevensTask]):
    """Asks for digits."""

    def load(self) -> Iterator[SevensTask]:
        for number in range(100):
            yield SevensTask(vf.TaskData(idx=number, prompt=f"say {number % 10}"), self.config.task)


class SevensEnv(vf.SingleAgentEnv):
    """Says "again" behind the first answer."""

    async def run(self, task: Any, agents: Any) -> None:
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("again")
