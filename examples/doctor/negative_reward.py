"""A rule of `relax doctor` of your own: the reward of half of the steps is negative."""

from __future__ import annotations

from collections.abc import Iterator

from relax_actors.monitoring.diagnosis import Finding, Observations, rule


@rule("The reward of half of the steps is negative.")
def negative_reward(seen: Observations) -> Iterator[Finding]:
    """Count the steps with a negative reward."""
    rewards = seen.series("reward")
    negative = [step for step, reward in rewards if reward < 0]
    if len(rewards) >= 10 and 2 * len(negative) > len(rewards):
        yield Finding(
            f"the reward is negative in {len(negative)} of {len(rewards)} steps",
            evidence=(seen.of_steps(negative, share=len(negative) / len(rewards)),),
            remedy="check the penalties of the reward",
            settings=("reward.function",),
        )
