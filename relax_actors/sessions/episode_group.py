"""Episodes of one row: its samples, their turn log, and the trajectory that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from broker.codec import Array
from relax_actors.config.environment import EnvironmentSection
from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.errors import EpisodesFailedError
from relax_actors.generation.batch import Samples
from relax_actors.messages import DropReason, FinishReason, Prompt, Sample, SessionLog, Trajectory
from relax_actors.messages.samples import PLAYER_REWARD, TRUNCATED
from relax_actors.runtime import Drop, Row
from relax_actors.sessions.conversation import Conversation
from relax_actors.sessions.episode import Episode, State
from relax_actors.sessions.episode_input import Media, Start
from relax_actors.sessions.player_history import untrained
from relax_actors.sessions.session_log import LazyLog

MASKED = TRUNCATED - {FinishReason.ABORT}


@dataclass(eq=False)
class Live:
    """An episode and its session.

    Attributes:
        episode: the episode.
        group: that of its row.
        session: name of the environment's session; empty before it is opened.
        restoring: whether the session is being restored, so that its last action must be repeated.
        losses: how often the session was lost since the last answer.
        failure: the last error of the environment.
        asked: the turn that was asked for last.
    """

    episode: Episode
    group: EpisodeGroup
    session: str = ""
    restoring: bool = False
    losses: int = 0
    failure: str = ""
    asked: Future[Samples] | None = None


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
    members: list[Live] = field(default_factory=list)
    earlier: float = 0.0

    def repeat(self, logs: Sequence[SessionLog]) -> int:
        """Bring the samples to where the logs of earlier actors end; return the number of turns that were taken."""
        self.earlier = max([self.earlier, *(log.seconds for log in logs)])
        return repeat([live.episode for live in self.members], logs)

    def seconds(self, now: float) -> float:
        """Return the time that actors have spent on the row."""
        return self.earlier + now - self.started

    @property
    def is_over(self) -> bool:
        """Whether all episodes have ended."""
        return all(live.episode.state is State.ENDED for live in self.members)

    def result(self, section: EnvironmentSection, fingerprints: Mapping[int, str]) -> Trajectory | Drop:
        """Return the trajectory of a row that is over, or why it is dropped.

        Args:
            section: says what happens to samples that failed or were cut off.
            fingerprints: of the weights that sampled, by version.

        Raises:
            EpisodesFailedError: the environment of every sample failed.
            ValueError: the samples do not form a trajectory.
        """
        trains, samples = not self.row.is_eval, []
        baselines = sum(live.episode.start.greedy for live in self.members) if trains else 0
        for live in self.members:
            failed, is_baseline = live.episode.reason is FinishReason.ERROR, trains and live.episode.start.greedy
            if failed and trains and section.on_error != "zero":
                if is_baseline:
                    msg = f"the environment failed in the greedy sample of {self.row.id}: {live.failure}"
                    raise EpisodesFailedError(msg)
                continue
            cut = section.mask_truncated and live.episode.reason in MASKED
            found = live.episode.sample(trained=not ((cut and trains) or is_baseline), everyone=not trains)
            samples.append(_without_reward(found) if failed else found)
        if len(samples) <= baselines or all(_has_no_turn(live.episode) for live in self.members):
            why = next((live.failure for live in self.members if live.failure), "")
            msg = f"the environment failed in all {len(self.members)} samples of {self.row.id}: {why}"
            raise EpisodesFailedError(msg)
        if not any(sequence.loss_mask.any() for sample in samples for sequence in sample.sequences):
            reasons = ", ".join(sorted({str(sample.finish_reason) for sample in samples}))
            return Drop(DropReason.TRUNCATED, f"no sample has a trained token; they ended with: {reasons}")
        prompt = self._prompt(samples)
        samples = [_with_prompt(sample, prompt) for sample in samples]
        trajectory = Trajectory.of(prompt, _with_equal_metrics(samples), fingerprints)
        return replace(trajectory, greedy_samples=baselines)

    def _prompt(self, samples: Sequence[Sample]) -> Any:
        if len(tokens := self.members[0].episode.start.tokens):
            return tokens
        first = next(sample.sequences[0] for sample in samples if sample.sequences[0].sampled.any())
        return first.token_ids[: np.flatnonzero(first.sampled)[0]]


def repeat(episodes: Sequence[Episode], logs: Sequence[SessionLog]) -> int:
    """Bring the episodes of a row to where its logs end; return the number of turns that were taken."""
    repeated, known = 0, range(len(episodes))
    for log in logs:
        repeated += sum(episodes[turn.sample].repeat(turn) for turn in log.turns if turn.sample in known)
        for state in log.states:
            if state.sample in known:
                episodes[state.sample].repeat_end(state)
    return repeated


@dataclass(frozen=True, slots=True)
class SeenPrompt:
    """A prompt as a model reads it that sees or hears.

    Attributes:
        tokens: `[len] int32`, with its placeholders expanded.
        media: its media and positions.
        prepare: prepares further media of the row.
    """

    tokens: Array
    media: PromptMedia
    prepare: Media


def starts_of(
    prompt: Prompt,
    samples: int,
    conversation: Conversation,
    section: EnvironmentSection,
    seen: SeenPrompt | None = None,
) -> list[Start]:
    """Return what the episodes of a row begin with.

    Args:
        prompt: of the row.
        samples: number of samples.
        conversation: of the run; it may add tools to the prompt.
        section: says where the prompt comes from, and who plays.
        seen: the prompt with its media; None for a model that reads text only.

    Raises:
        RowError: the prompt cannot be rendered.
    """
    first = Start(0, prompt.seed, prompt.tokens, prompt.messages, section.players, section.trained_players)
    if seen is not None:
        first = replace(first, tokens=seen.tokens, media=seen.media, sources=prompt.media)
    if section.prompt == "environment":
        none = None if seen is None else seen.prepare.none
        first = replace(first, tokens=np.zeros(0, np.int32), messages=[], media=none, sources=())
    elif conversation.offers_tools and prompt.messages:
        first = replace(first, tokens=conversation.prompt(prompt.messages))
        if seen is not None:
            found = seen.prepare.read(0, seen.prepare.none, first.tokens, prompt.media, "the prompt with its tools")
            first = replace(first, tokens=found.tokens, media=found.media, observed=found.observed)
    return [replace(first, sample=i) for i in range(samples)]


def task_of(prompt: Prompt) -> dict[str, Any]:
    """Return a row's task as an environment gets it; `stored` media have their paths in the store."""
    task = {"prompt": prompt.messages or prompt.text, "answer": prompt.answer, "metadata": prompt.metadata}
    if prompt.media:
        task["media"] = [{"kind": one.kind, "path": one.path, "stored": one.stored} for one in prompt.media]
    return task


def _has_no_turn(episode: Episode) -> bool:
    """Whether the environment of an episode failed before its first turn."""
    return episode.reason is FinishReason.ERROR and not episode.turns


def _without_reward(sample: Sample) -> Sample:
    rewards = None if sample.turn_rewards is None else np.zeros_like(sample.turn_rewards)
    metrics = dict(sample.metrics)
    for name in metrics:
        if name == "environment_reward" or name.startswith(PLAYER_REWARD):
            metrics[name] = 0.0
    return replace(sample, metrics=metrics, turn_rewards=rewards)


def _with_prompt(sample: Sample, prompt: Any) -> Sample:
    """Give a sample that ended before its environment gave a prompt that of another sample: no sequence is empty."""
    if any(len(sequence.token_ids) for sequence in sample.sequences):
        return sample
    return replace(sample, sequences=(untrained(prompt, sample.sequences[0].player),))


def _with_equal_metrics(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples that have the same metrics; one that an environment did not report is 0."""
    names = {name for sample in samples for name in sample.metrics}
    return [replace(sample, metrics={name: sample.metrics.get(name, 0.0) for name in names}) for sample in samples]
