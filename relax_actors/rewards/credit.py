r"""Rewards of single turns as rewards of tokens, so that every advantage estimator gives credit to turns.

The return of turn t is $G_t = r_t + \gamma G_{t+1}$. The reward of a sample is $G_0$. The last token of turn t has
reward $G_t - G_{t+1}$, and that of the last turn $G_T - G_0$: from any token on, the rewards of a sample and of its
tokens add up to the return of the token's turn.
"""

from __future__ import annotations

import numpy as np

from relax_actors.messages import Reward, Trajectory


def by_turn(trajectory: Trajectory, discount: float) -> Reward:
    """Return the rewards of a row whose turns get their own credit.

    Args:
        trajectory: samples with rewards of turns.
        discount: factor of a turn.

    Raises:
        ValueError: the turns have no rewards.
    """
    if trajectory.turn_rewards is None:
        msg = 'environment.credit = "turn" needs the rewards of turns, which the trajectory does not hold'
        raise ValueError(msg)
    values = np.zeros(len(trajectory.texts), np.float64)
    tokens = np.zeros(len(trajectory.token_ids), np.float64)
    last, start = trajectory.turn_spans[:, 1] - 1, 0
    for i, count in enumerate(trajectory.turn_counts.tolist()):
        if not count:
            continue
        part = slice(start, start + count)
        start += count
        returns = discounted(trajectory.turn_rewards[part].astype(np.float64), discount)
        values[i] = returns[0]
        tokens[last[part]] = returns - np.append(returns[1:], returns[0])
    lengths = trajectory.sample_lengths.astype(np.int32)
    return Reward(values.astype(np.float32), {}, tokens.astype(np.float32), lengths)


def discounted(rewards: np.ndarray, discount: float) -> np.ndarray:
    """Return the discounted returns of turns, `[turns] float64`."""
    found, total = np.zeros(len(rewards)), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        total = found[t] = rewards[t] + discount * total
    return found
