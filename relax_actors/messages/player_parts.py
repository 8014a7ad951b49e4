"""Parts of a trajectory: what each player of its episodes has read and written, as a trajectory of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from relax_actors.messages.cells import Reward
from relax_actors.messages.samples import Array
from relax_actors.messages.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class PlayerPart:
    """A player's part of a trajectory.

    Attributes:
        player: name of the player.
        samples: `[m] int64`, indices of the samples in which the player has acted.
        tokens: `[tokens] int64`, indices of the player's tokens in these samples.
        trajectory: the player's sequences of these samples; without metrics, experts and conversations.
    """

    player: str
    samples: Array
    tokens: Array
    trajectory: Trajectory

    def reward(self, whole: Reward) -> Reward:
        """Return the player's part of the rewards of the row: its component, or else the reward of the sample."""
        values = whole.components.get(self.player, whole.values)[self.samples]
        tokens = None if whole.token_values is None else whole.token_values[self.tokens]
        lengths = None if tokens is None else self.trajectory.sample_lengths.astype(np.int32)
        return Reward(values, {}, tokens, lengths)


def parts_of(trajectory: Trajectory) -> list[PlayerPart]:
    """Return the parts of the players that have trained tokens, in the order in which they appear."""
    parts = []
    for player in dict.fromkeys(trajectory.players):
        of_player = np.array([name == player for name in trajectory.players])
        part = _part(trajectory, player, of_player)
        if part is not None:
            parts.append(part)
    return parts


def _part(trajectory: Trajectory, player: str, of_player: Array) -> PlayerPart | None:
    lengths, spans = trajectory.lengths, trajectory.turn_spans
    sequence_of_token = np.repeat(np.arange(len(lengths)), lengths)
    sample_of_sequence = np.repeat(np.arange(len(trajectory.counts)), trajectory.counts)
    turns = of_player[sequence_of_token[spans[:, 0]]]
    acted = np.unique(sample_of_sequence[sequence_of_token[spans[turns, 0]]])
    kept = of_player & np.isin(sample_of_sequence, acted)
    tokens = np.flatnonzero(kept[sequence_of_token])
    if not trajectory.trained[tokens].any():
        return None
    rewards = trajectory.turn_rewards
    part = replace(
        trajectory,
        lengths=lengths[kept],
        token_ids=trajectory.token_ids[tokens],
        logprobs=trajectory.logprobs[tokens],
        versions=trajectory.versions[tokens],
        texts=[trajectory.texts[i] for i in acted],
        finish_reasons=[trajectory.finish_reasons[i] for i in acted],
        fingerprints=[],
        loss_mask=trajectory.trained[tokens],
        sequence_counts=np.bincount(sample_of_sequence[kept], minlength=len(trajectory.counts))[acted].astype(np.int32),
        shared_lengths=trajectory.shared[kept].astype(np.int32),
        spans=np.searchsorted(tokens, spans[turns]).astype(np.int32),
        metrics={},
        turn_rewards=None if rewards is None else rewards[turns],
        conversations=None,
        players=[player] * int(kept.sum()),
        prompt_experts=None,
        routed_experts=None,
        observed=[],  # advantages need no media
    )
    return PlayerPart(player, acted, tokens, part)
