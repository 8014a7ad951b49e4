"""A custom rollout and reward for runs of tests: two turns, a branch, and rewards of single tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relax_actors import Role, Row
from relax_actors.engines.protocols import Generation
from relax_actors.messages import NOT_SAMPLED, Reward, Sample, TokenSequence
from relax_actors.roles.episode_rollout import EpisodeRollout, Generate

Tokens = NDArray[np.int32]


class Branches(EpisodeRollout):
    """Answers twice in one sequence, and once more from the first answer alone in a second one."""

    def samples(self, row: Row, generate: Generate) -> list[Sample]:
        prompt, again = self.prompt_tokens(row), self.tokens(">")
        first = generate([prompt] * self.group_size(row))
        second = generate([np.concatenate([prompt, one.tokens, again]) for one in first])
        branch = generate([np.concatenate([prompt[:1], one.tokens]) for one in first])
        return [
            Sample(
                (
                    lay(prompt, one, again, two),
                    lay(np.concatenate([prompt[:1], one.tokens]), other),
                ),
                self.text(two.tokens),
                two.finish_reason,
                {"turns": 3.0},
            )
            for one, two, other in zip(first, second, branch, strict=True)
        ]


def lay(*parts: Tokens | Generation) -> TokenSequence:
    """Lay tokens that were read and generations end to end; what was generated is trained."""
    tokens = [part.tokens if isinstance(part, Generation) else part for part in parts]
    sampled = np.repeat([isinstance(part, Generation) for part in parts], [len(part) for part in tokens])
    logprobs, versions = np.zeros(len(sampled), np.float32), np.full(len(sampled), NOT_SAMPLED, np.int32)
    logprobs[sampled] = np.concatenate([part.logprobs for part in parts if isinstance(part, Generation)])
    versions[sampled] = np.concatenate([part.versions for part in parts if isinstance(part, Generation)])
    return TokenSequence(np.concatenate(tokens).astype(np.int32), sampled, logprobs, versions)


class TokenReward(Role):
    """Rewards every even token a little, beside the reward of the sample."""

    reads = ("trajectory", "reward")
    writes = "token_reward"

    def handle(self, row: Row) -> Reward:
        trajectory = row.trajectory
        even = (trajectory.token_ids % 2 == 0) & trajectory.trained
        values = np.where(even, 0.05, 0.0).astype(np.float32)
        return Reward(row.reward.values, {}, values, trajectory.sample_lengths.astype(np.int32))


class NanTokens(TokenReward):
    """Rewards one row of each step with a number that is not finite."""

    def handle(self, row: Row) -> Reward:
        reward = super().handle(row)
        assert reward.token_values is not None
        if row.id.index == 1:
            object.__setattr__(reward, "token_values", np.full_like(reward.token_values, np.nan))
        return reward
