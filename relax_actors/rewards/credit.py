r"""An environment's rewards as those of samples, players, and tokens of turns.

The return of turn t is $G_t = r_t + \gamma G_{t+1}$. The reward of a sample is the sum $R$ of its turns' rewards,
without discount. The last token of turn t has reward $G_t - G_{t+1}$, and that of the last turn $G_T - R$: from any
token on, the rewards of a sample and of its tokens add up to the return of the token's turn. The same holds for
branches, the sequences of a sample, whose reward is the sum of those of their turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from relax_actors.errors import RowError
from relax_actors.messages import Prompt, Reward, Sample, Trajectory
from relax_actors.messages.player_parts import parts_of
from relax_actors.messages.samples import PLAYER_REWARD

Credit: TypeAlias = Literal["episode", "branch", "turn"]


def environment_reward(trajectory: Trajectory, credit: Credit, discount: float, trained: Sequence[str] = ()) -> Reward:
    """Return a row's rewards by its environment, with players and turns.

    Raises:
        ValueError: the turns have no rewards, which the credit needs.
        RowError: the players of the trajectory are not those of the run.
    """
    own = partial(token_rewards, credit=credit, discount=discount)
    components: dict[str, NDArray[np.float32]] = {}
    tokens = np.zeros(len(trajectory.token_ids), np.float32)
    if trajectory.players:
        prefix, metrics = PLAYER_REWARD, trajectory.metrics
        named = {name.removeprefix(prefix): v for name, v in metrics.items() if name.startswith(prefix)}
        components = {name: np.array(v, np.float32) for name, v in named.items()}
        if not trained or not set(trained) <= named.keys():
            known = f"the trained players are {', '.join(trained)}" if trained else "the run has no players"
            msg = f"the trajectory has rewards of the players {', '.join(sorted(named)) or '(none)'}; {known}"
            raise RowError(msg)
        values = np.sum([named[name] for name in trained], axis=0)
        for part in parts_of(trajectory) if credit != "episode" else ():
            tokens[part.tokens] = own(part.trajectory)
    else:
        tokens, n = own(trajectory), len(trajectory.texts)
        samples = np.repeat(np.arange(n), trajectory.turn_counts)
        values = np.bincount(samples, trajectory.turn_rewards, minlength=n)
    if credit == "episode":
        return Reward(values.astype(np.float32), components)
    return Reward(values.astype(np.float32), components, tokens, trajectory.sample_lengths.astype(np.int32))


def token_rewards(trajectory: Trajectory, credit: Credit, discount: float) -> NDArray[np.float32]:
    """Return tokens' rewards by their turn's return, `[total] float32`; raises ValueError."""
    if trajectory.turn_rewards is None:
        msg = f'environment.credit = "{credit}" needs the rewards of turns, which the trajectory does not hold'
        raise ValueError(msg)
    tokens = np.zeros(len(trajectory.token_ids), np.float64)
    if credit == "episode":
        return tokens.astype(np.float32)
    last = trajectory.turn_spans[:, 1] - 1
    numbers = trajectory.turn_numbers if credit == "turn" else trajectory.branch_numbers
    start = 0
    for count in trajectory.turn_counts.tolist():
        part = slice(start, start + count)
        start += count
        if not count:
            continue
        # A unit of credit is a turn, or all turns of a branch.
        units = np.unique(numbers[last[part]], return_inverse=True)[1]
        rewards = np.bincount(units, trajectory.turn_rewards[part]).astype(np.float64)
        returns = discounted(rewards, discount)
        ends = last[part][np.flatnonzero(np.diff(units, append=len(rewards)))]
        tokens[ends] = returns - np.append(returns[1:], rewards.sum())
    return tokens.astype(np.float32)


def discounted(rewards: NDArray[np.float64], discount: float) -> NDArray[np.float64]:
    """Return the discounted returns of turns or branches, `[units] float64`."""
    returns, total = np.zeros(len(rewards)), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        total = returns[t] = rewards[t] + discount * total
    return returns


def environment(completion: str, prompt: Prompt, sample: Sample | None = None) -> float:
    """Return the sum of the rewards that the environment of an episode gave.

    Raises:
        RowError: the sample is no episode, nor the work of an agent that reported a reward.
    """
    del completion, prompt
    if sample is None or "environment_reward" not in sample.metrics:
        msg = (
            'reward "environment" needs samples that an environment or an agent has rewarded; set [environment] or '
            "[agent]"
        )
        raise RowError(msg)
    return sample.metrics["environment_reward"]
