"""Episodes of one row: its samples, their log, and the trajectory that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from broker.codec import Array
from relax_actors.config.environment import EnvironmentSection
from relax_actors.errors import EpisodesFailedError
from relax_actors.messages import DropReason, FinishReason, Sample, SessionLog, Trajectory
from relax_actors.messages.samples import PLAYER_REWARD, TRUNCATED
from relax_actors.runtime import Drop, Row
from relax_actors.sessions.episode import Episode
from relax_actors.sessions.forest import untrained
from relax_actors.sessions.session_log import LazyLog, restore

MASKED = TRUNCATED - {FinishReason.ABORT}


@dataclass(eq=False)
class EpisodeGroup:
    """Episodes of one row.

    Attributes:
        row: the row.
        log: its log.
        started: monotonic time at which this actor began with it.
        members: its samples.
        earlier: seconds that other actors spent on it before.
    """

    row: Row
    log: LazyLog
    started: float
    members: list[Episode] = field(default_factory=list)
    earlier: float = 0.0

    def restore(self, logs: Sequence[SessionLog]) -> int:
        """Replay the logs of earlier actors; return the number of turns taken from them."""
        self.earlier = max([self.earlier, *(log.seconds for log in logs)])
        return restore(self.members, logs)

    def seconds(self, now: float) -> float:
        """Return the time that actors have spent on the row."""
        return self.earlier + now - self.started

    @property
    def is_over(self) -> bool:
        """Whether all episodes have ended."""
        return all(episode.state is not None for episode in self.members)

    def result(self, section: EnvironmentSection, fingerprints: Mapping[int, str]) -> Trajectory | Drop:
        """Return the trajectory of a finished row, or why it is dropped; see [environment].

        Raises:
            EpisodesFailedError: the environment of every sample failed.
            ValueError: the samples do not form a trajectory.
        """
        is_eval, members = self.row.is_eval, self.members
        baselines = 0 if is_eval else sum(episode.start.greedy for episode in members)
        if (
            baselines
            and section.on_error != "zero"
            and (failed := [e for e in members if e.start.greedy and _failed(e)])
        ):
            msg = f"the environment failed in the greedy sample of {self.row.id}: {failed[0].failure}"
            raise EpisodesFailedError(msg)
        kept = [e for e in members if is_eval or section.on_error == "zero" or not _failed(e)]
        if len(kept) <= baselines or all(_failed(e) and not e.turns for e in members):
            why = next((episode.failure for episode in members if episode.failure), "")
            msg = f"the environment failed in all {len(members)} samples of {self.row.id}: {why}"
            raise EpisodesFailedError(msg)
        samples = [self._sample(episode, section) for episode in kept]
        if not any(sequence.loss_mask.any() for sample in samples for sequence in sample.sequences):
            reasons = ", ".join(sorted({str(sample.finish_reason) for sample in samples}))
            return Drop(DropReason.TRUNCATED, f"no sample has a trained token; they ended with: {reasons}")
        prompt = self._prompt(samples)
        return trajectory_of(prompt, [_with_prompt(sample, prompt) for sample in samples], baselines, fingerprints)

    def _sample(self, episode: Episode, section: EnvironmentSection) -> Sample:
        is_eval, cut = self.row.is_eval, section.mask_truncated and episode.reason in MASKED
        sample = episode.sample(trained=is_eval or not (cut or episode.start.greedy), everyone=is_eval)
        return _without_reward(sample) if _failed(episode) else sample

    def _prompt(self, samples: Sequence[Sample]) -> Array:
        if len(tokens := self.members[0].start.tokens):
            return tokens
        first = next(sample.sequences[0] for sample in samples if sample.sequences[0].sampled.any())
        return first.token_ids[: np.flatnonzero(first.sampled)[0]]


def _failed(episode: Episode) -> bool:
    return episode.reason is FinishReason.ERROR


def _without_reward(sample: Sample) -> Sample:
    rewards = None if sample.turn_rewards is None else np.zeros_like(sample.turn_rewards)
    metrics = {
        name: 0.0 if name == "environment_reward" or name.startswith(PLAYER_REWARD) else value
        for name, value in sample.metrics.items()
    }
    return replace(sample, metrics=metrics, turn_rewards=rewards)


def _with_prompt(sample: Sample, prompt: Array) -> Sample:
    """Give a sample without a prompt the prompt of another sample: no sequence is empty."""
    if any(len(sequence.token_ids) for sequence in sample.sequences):
        return sample
    return replace(sample, sequences=(untrained(prompt, sample.sequences[0].player),))


def trajectory_of(
    prompt: Array, samples: Sequence[Sample], baselines: int, fingerprints: Mapping[int, str]
) -> Trajectory:
    """Return the trajectory of a row; a metric that a sample does not have is 0.

    `prompt` is `[len] int32`. The last `baselines` samples are greedy. `fingerprints` are those of the weights that
    sampled, by version.

    Raises:
        ValueError: the samples do not form a trajectory.
    """
    names = {name for sample in samples for name in sample.metrics}
    samples = [replace(one, metrics={name: one.metrics.get(name, 0.0) for name in names}) for one in samples]
    return replace(Trajectory.of(prompt, samples, fingerprints), greedy_samples=baselines)
