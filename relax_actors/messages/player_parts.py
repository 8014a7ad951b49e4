"""Parts of a trajectory that are compared: each player's, as trajectories."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from relax_actors.messages.cells import Reward
from relax_actors.messages.samples import Array
from relax_actors.messages.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class PlayerPart:
    """Part of a trajectory whose samples are compared with each other.

    Attributes:
        title: what it is of, for errors: "player NAME", or the players of a sample.
        players: `[m]`, name of the player of each of its samples.
        samples: `[m] int64`, indices of the samples in which these players have acted.
        tokens: `[tokens] int64`, indices of the players' tokens in these samples.
        trajectory: the players' sequences of these samples; without metrics, experts and conversations.
    """

    title: str
    players: tuple[str, ...]
    samples: Array
    tokens: Array
    trajectory: Trajectory

    def reward(self, whole: Reward) -> Reward:
        """Return the players' part of a row's rewards: their components, or the samples'."""
        both = zip(self.players, self.samples.tolist(), strict=True)
        values = np.array([whole.components.get(player, whole.values)[i] for player, i in both], whole.values.dtype)
        tokens = None if whole.token_values is None else whole.token_values[self.tokens]
        lengths = None if tokens is None else self.trajectory.sample_lengths.astype(np.int32)
        return Reward(values, {}, tokens, lengths)


def parts_of(trajectory: Trajectory, rivals: Collection[str] = ()) -> list[PlayerPart]:
    """Return the compared parts in order of appearance; each has trained tokens.

    A player is compared with itself in the other samples of the row.

    Args:
        trajectory: samples of a row, with players.
        rivals: players that are compared with each other in the same sample instead.
    """
    samples = np.repeat(np.arange(len(trajectory.counts)), trajectory.counts)
    parts = []
    for player in dict.fromkeys(name for name in trajectory.players if name not in rivals):
        own = np.flatnonzero([name == player for name in trajectory.players])
        parts.append(_part(trajectory, f"player {player}", own, samples[own], [player] * len(trajectory.counts)))
    for sample in range(len(trajectory.counts)) if rivals else ():
        names = [name for name, i in zip(trajectory.players, samples, strict=True) if i == sample and name in rivals]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        own = np.flatnonzero([n in numbers and i == sample for n, i in zip(trajectory.players, samples, strict=True)])
        attempts = np.array([numbers[trajectory.players[i]] for i in own], np.int64)
        order = np.argsort(attempts, kind="stable")
        title = f"players {', '.join(numbers)} of sample {sample}"
        parts.append(_part(trajectory, title, own[order], attempts[order], [*numbers]))
    return [part for part in parts if part is not None]


def _part(trajectory: Trajectory, title: str, sequences: Array, groups: Array, names: list[str]) -> PlayerPart | None:
    """Return the part of some sequences.

    Args:
        trajectory: the whole.
        title: see `PlayerPart`.
        sequences: `[k] int64`, indices of the sequences, those of a group together.
        groups: `[k] int64`, number of the group of each; each group is a sample of the part.
        names: name of the player of each group.
    """
    lengths, spans = trajectory.lengths, trajectory.turn_spans
    starts = np.cumsum(lengths) - lengths
    sequence_of_token = np.repeat(np.arange(len(lengths)), lengths)
    sequence_of_turn = sequence_of_token[spans[:, 0]]
    acted = np.isin(groups, groups[np.isin(sequences, sequence_of_turn)])
    sequences, groups = sequences[acted], groups[acted]
    if not len(sequences):
        return None
    tokens = np.concatenate([np.arange(starts[i], starts[i] + lengths[i]) for i in sequences])
    if not trajectory.trained[tokens].any():
        return None
    places = np.full(len(sequence_of_token), -1)
    places[tokens] = np.arange(len(tokens))
    turns = np.flatnonzero(np.isin(sequence_of_turn, sequences))
    turns = turns[np.argsort(places[spans[turns, 0]], kind="stable")]
    own_spans = np.stack([places[spans[turns, 0]], places[spans[turns, 1] - 1] + 1], 1)
    numbers, first, counts = np.unique(groups, return_index=True, return_counts=True)
    sample_of_sequence = np.repeat(np.arange(len(trajectory.counts)), trajectory.counts)
    samples, rewards = sample_of_sequence[sequences[first]], trajectory.turn_rewards
    part = replace(
        trajectory,
        lengths=lengths[sequences],
        token_ids=trajectory.token_ids[tokens],
        logprobs=trajectory.logprobs[tokens],
        versions=trajectory.versions[tokens],
        texts=[trajectory.texts[i] for i in samples],
        finish_reasons=[trajectory.finish_reasons[i] for i in samples],
        fingerprints=[],
        loss_mask=trajectory.trained[tokens],
        sequence_counts=counts.astype(np.int32),
        shared_lengths=trajectory.shared[sequences].astype(np.int32),
        spans=own_spans.astype(np.int32),
        metrics={},
        turn_rewards=None if rewards is None else rewards[turns],
        conversations=None,
        players=[trajectory.players[i] for i in sequences],
        prompt_experts=None,
        routed_experts=None,
        entropies=None,
        observed=[],  # advantages need no media
    )
    return PlayerPart(title, tuple(names[number] for number in numbers), samples, tokens, part)
