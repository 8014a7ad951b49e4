"""The rows of a step, and whether what a row holds can be true: what the engines would choke on never reaches them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from broker.codec import Array
from broker.errors import RelaxError, StoreError
from relax_actors.config import Config
from relax_actors.engines.training import Sequences, TrainBatch
from relax_actors.messages import Advantage, Dropped, DropReason, Prompt, Quarantined, Trajectory
from relax_actors.modelfolder import measure

MAX_ADVANTAGE = 1e6
MAX_LOGPROB = 0.1


class Limits:
    """What a model can take.

    Args:
        config: the run's.
    """

    def __init__(self, config: Config) -> None:
        facts = measure(config.model_path)
        self._vocabulary = facts.vocabulary
        self._context, self._budget = facts.context_length, config.trainer.token_budget
        self._max_tokens, self._steps = config.rollout.max_tokens, config.run.steps

    def of_prompt(self, prompt: Prompt) -> str:
        """Why a prompt cannot be generated from; empty if it can."""
        length, room = len(prompt.tokens), self._context - self._max_tokens
        if not 0 < length <= room:
            return f"the prompt has {length} tokens; the model's context leaves 1 to {room}"
        if prompt.min_version > self._steps:
            return f"the prompt wants weights {prompt.min_version}, the run has {self._steps} steps"
        return self._foreign(prompt.tokens, "the prompt's tokens")

    def of_row(self, trajectory: Trajectory, advantage: Advantage, step: int) -> str:
        """Why a row cannot be trained in a step; empty if it can."""
        lengths, prompt = trajectory.lengths, trajectory.prompt_tokens
        if len(advantage.values) != len(lengths):
            return f"there are {len(advantage.values)} advantages for {len(lengths)} samples"
        if not len(prompt) or int(lengths.min()) < 1:
            return "the prompt or a sample has no tokens"
        if (longest := len(prompt) + int(lengths.max())) > min(self._context, self._budget):
            return f"a sequence has {longest} tokens, more than the context or trainer.token_budget"
        if np.abs(advantage.values).max() > MAX_ADVANTAGE:
            return f"an advantage is over {MAX_ADVANTAGE:g}; scale the rewards"
        return self._of_tokens(trajectory, step)

    def _of_tokens(self, trajectory: Trajectory, step: int) -> str:
        logprobs = trajectory.logprobs
        if not (logprobs <= MAX_LOGPROB).all() or not (logprobs > np.finfo(np.float32).min).all():
            return "a log-prob is positive or not finite"
        if trajectory.versions.min() < 0 or int(trajectory.versions.max()) > step:
            return f"a token is said to be of a version that is not from 0 to {step}"
        return self._foreign(trajectory.prompt_tokens, "the prompt's tokens") or self._foreign(
            trajectory.tokens, "the samples' tokens"
        )

    def _foreign(self, tokens: Array, what: str) -> str:
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocabulary:
            return f"{what} are not all in the model's vocabulary of {self._vocabulary}"
        return ""


@dataclass(slots=True)
class StepRows:
    """The rows of a step as the trainer needs them."""

    ids: list[int]
    trajectories: list[Trajectory]
    advantages: list[Advantage]
    proximal: list[Array] | None = None

    def batch(self) -> TrainBatch:
        """All samples, row after row."""
        prompts: list[Array] = []
        completions: list[Array] = []
        logprobs: list[Array] = []
        for trajectory in self.trajectories:
            for sample in trajectory.samples:
                prompts.append(trajectory.prompt_tokens)
                completions.append(sample.tokens)
                logprobs.append(sample.logprobs)
        values = np.concatenate([a.values for a in self.advantages]).astype(np.float32)
        proximal = None
        if self.proximal is not None:
            pairs = zip(self.proximal, self.trajectories, strict=True)
            proximal = [part for array, t in pairs for part in np.split(array, np.cumsum(t.lengths)[:-1])]
        return TrainBatch(Sequences(prompts, completions), logprobs, values, proximal)

    @property
    def oldest(self) -> int:
        """The oldest version that wrote a token."""
        return min(int(t.versions.min()) for t in self.trajectories if len(t.versions))

    @property
    def newest(self) -> int:
        """The newest version that wrote a token."""
        return max(int(t.versions.max()) for t in self.trajectories if len(t.versions))


def lost_row(error: RelaxError) -> Dropped | Quarantined:
    """How a row ends whose data cannot be read: made again if it was lost, looked at if it was never good."""
    if isinstance(error, StoreError):
        return Dropped(DropReason.LOST_SEGMENT, str(error)[:2000])
    return Quarantined("trainer", 1, f"{type(error).__name__}: {error}"[:2000], "")
