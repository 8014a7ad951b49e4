"""The rows of a step, and whether what a row holds can be true: what the engines would choke on never reaches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from broker.codec import Array
from broker.subjects import RowId
from broker.table import Table
from relax_actors.config import Config
from relax_actors.data.model_folder import measure
from relax_actors.engines.protocols import Sequences, TrainBatch
from relax_actors.errors import ConfigError, RelaxError, StoreError
from relax_actors.messages import Advantage, Dropped, DropReason, Prompt, Quarantined, Trajectory
from relax_actors.messages.experts import expanded, flaw
from relax_actors.runtime.cells import read_column, read_logprobs

PROXIMAL, REFERENCE = "actor_fwd", "reference"
"""Columns of log-probs, `[total] float32`: the proximal policy's, where algorithm.proximal asks for it, and the KL's
reference, where actors compute it."""
Columns = dict[str, Any]
"""What is read of a row by column; a `RelaxError` in place of what cannot be had."""
Lost = dict[int, Dropped | Quarantined]
"""How rows end that cannot be trained, by index."""
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
        self._context, self._budget = facts.context_length, config.trainer.max_tokens_per_microbatch
        self._max_tokens, self._steps = config.rollout.max_tokens, config.run.steps
        self._moe = facts.moe if config.trainer.router_replay else None

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
        if len(advantage.values) != len(trajectory.lengths):
            return f"there are {len(advantage.values)} advantages for {len(trajectory.lengths)} samples"
        if np.abs(advantage.values).max(initial=0) > MAX_ADVANTAGE:
            return f"an advantage is over {MAX_ADVANTAGE:g}; scale the rewards"
        return self.of_trajectory(trajectory, step)

    def of_trajectory(self, trajectory: Trajectory, step: int) -> str:
        """Why a row of a step cannot be passed through the model; empty if it can."""
        lengths, prompt = trajectory.lengths, trajectory.prompt_tokens
        if not len(prompt) or int(lengths.min()) < 1:
            return "the prompt or a sample has no tokens"
        if (longest := len(prompt) + int(lengths.max())) > min(self._context, self._budget):
            return f"a sequence has {longest} tokens, more than the context or trainer.max_tokens_per_microbatch"
        return self._of_tokens(trajectory, step) or self._of_experts(trajectory)

    def _of_tokens(self, trajectory: Trajectory, step: int) -> str:
        logprobs = trajectory.logprobs
        if not (logprobs <= MAX_LOGPROB).all() or not (logprobs > np.finfo(np.float32).min).all():
            return "a log-prob is positive or not finite"
        if trajectory.versions.min() < 0 or int(trajectory.versions.max()) > step:
            return f"a token is said to be of a version that is not from 0 to {step}"
        return self._foreign(trajectory.prompt_tokens, "the prompt's tokens") or self._foreign(
            trajectory.tokens, "the samples' tokens"
        )

    def _of_experts(self, trajectory: Trajectory) -> str:
        moe, prompt, routed = self._moe, trajectory.prompt_experts, trajectory.routed_experts
        if moe is None:
            return ""
        if prompt is None or routed is None:
            return "its rollout has not recorded experts, which trainer.router_replay replays"
        if routed.shape[1:] != (moe.layers, moe.experts_of_token):
            return f"experts are {list(routed.shape)}, not of {moe.layers} layers and {moe.experts_of_token} a token"
        return next((why for part in (prompt, routed) if (why := flaw(expanded(part), moe.experts))), "")

    def _foreign(self, tokens: Array, what: str) -> str:
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocabulary:
            return f"{what} are not all in the model's vocabulary of {self._vocabulary}"
        return ""


@dataclass(slots=True)
class StepRows:
    """The rows of a step."""

    ids: list[int]
    trajectories: list[Trajectory]
    advantages: list[Advantage]
    scores: dict[str, list[Array]] = field(default_factory=dict)
    """Columns of log-probs, each `[total] float32` a row."""
    replays: bool = False
    """Whether engines are to compute with the recorded experts."""

    def add(self, index: int, columns: Columns) -> None:
        """Take in one more row."""
        self.ids.append(index)
        self.trajectories.append(columns["trajectory"])
        self.advantages.append(columns["advantage"])
        for name, arrays in self.scores.items():
            arrays.append(columns[name])

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, more: StepRows) -> None:
        """Take in the rows of another."""
        self.ids += more.ids
        self.trajectories += more.trajectories
        self.advantages += more.advantages
        for name, arrays in more.scores.items():
            self.scores.setdefault(name, []).extend(arrays)

    def part(self, rows: range) -> StepRows:
        """Some of the rows."""
        cut = slice(rows.start, rows.stop)
        scores = {name: arrays[cut] for name, arrays in self.scores.items()}
        return StepRows(self.ids[cut], self.trajectories[cut], self.advantages[cut], scores, self.replays)

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens of each sequence of each row, prompts included."""
        return [(t.lengths + len(t.prompt_tokens)).tolist() for t in self.trajectories]

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
        return TrainBatch(
            Sequences(prompts, completions, experts_of(self.trajectories) if self.replays else None),
            logprobs,
            values,
            proximal_logprobs=self._by_sample(PROXIMAL),
            reference_logprobs=self._by_sample(REFERENCE),
            samples=[len(t.lengths) for t in self.trajectories],
        )

    def _by_sample(self, column: str) -> list[Array] | None:
        """A column of log-probs, `[len] float32` a sample; None if it was not read."""
        if column not in self.scores:
            return None
        pairs = zip(self.scores[column], self.trajectories, strict=True)
        return [part for array, t in pairs for part in np.split(array, np.cumsum(t.lengths)[:-1])]

    @property
    def oldest(self) -> int:
        """The oldest version that wrote a token."""
        return min(self.oldest_of_rows)

    @property
    def oldest_of_rows(self) -> list[int]:
        """The oldest version that wrote a token, of each row."""
        return [int(t.versions.min()) for t in self.trajectories if len(t.versions)]

    @property
    def span(self) -> int:
        """Versions that wrote one trajectory, at most; more than 1 only where weights change in mid-generation."""
        return max(len(np.unique(t.versions)) for t in self.trajectories)

    def older_than(self, step: int, most: int) -> int:
        """Rows with a token that is more than `most` versions older than `step`."""
        return sum(step - oldest > most for oldest in self.oldest_of_rows)


class StepReader:
    """Reads the rows of a step.

    Args:
        table: the run's.
        config: the run's.
    """

    def __init__(self, table: Table, config: Config) -> None:
        self._table, self._staleness, self._limits = table, config.staleness, Limits(config)
        self._replays = config.trainer.router_replay
        wanted = {
            PROXIMAL: config.algorithm.proximal == PROXIMAL,
            REFERENCE: config.algorithm.kl_coefficient > 0 and not config.computes_reference,
        }
        self.columns = tuple(name for name, wants in wanted.items() if wants)

    def empty(self) -> StepRows:
        """No rows yet."""
        return StepRows([], [], [], {name: [] for name in self.columns}, self._replays)

    def read(self, step: int, indices: Sequence[int]) -> tuple[StepRows, Lost]:
        """The rows that can be trained, and how those end that cannot."""
        rows, lost = self.empty(), {}
        for index, columns in zip(indices, self._columns(step, indices), strict=True):
            fate = self._fate(columns, step)
            if fate is None:
                rows.add(index, columns)
            else:
                lost[index] = fate
        return rows, lost

    def read_again(self, step: int, indices: Sequence[int]) -> StepRows:
        """The rows of a step that was trained before.

        Raises:
            ConfigError: one is lost.
        """
        rows = self.empty()
        for index, columns in zip(indices, self._columns(step, indices), strict=True):
            if error := next((c for c in columns.values() if isinstance(c, RelaxError)), None):
                msg = f"step {step} cannot be replayed: row {index} is lost ({error}); restore the store's folder"
                raise ConfigError(msg)
            rows.add(index, columns)
        return rows

    def _fate(self, columns: Columns, step: int) -> Dropped | Quarantined | None:
        """How a row ends that cannot be trained; None if it can."""
        if error := next((c for c in columns.values() if isinstance(c, RelaxError)), None):
            return lost_row(error)
        trajectory: Trajectory = columns["trajectory"]
        if why := self._limits.of_row(trajectory, columns["advantage"], step):
            return Quarantined("trainer", 1, why, "")
        staleness = step - int(trajectory.versions.min())
        if staleness > self._staleness.max and self._staleness.policy == "drop":
            return Dropped(DropReason.TOO_OLD, f"staleness {staleness} is over staleness.max")
        return None

    def _columns(self, step: int, indices: Sequence[int]) -> list[Columns]:
        """What the trainer reads of each row, or why it cannot."""
        rows = [RowId(step, index) for index in indices]
        known: list[Columns] = [{} for _ in rows]
        for name, expected in (("trajectory", Trajectory), ("advantage", Advantage)):
            for columns, found in zip(known, read_column(self._table, rows, name, expected), strict=True):
                columns[name] = found
        for name in self.columns:
            trajectories = [columns["trajectory"] for columns in known]
            for columns, found in zip(known, read_logprobs(self._table, rows, name, trajectories), strict=True):
                columns[name] = found
        return known


def experts_of(trajectories: Sequence[Trajectory]) -> list[Array] | None:
    """Recorded experts of all samples, `[prompt_len + len - 1, layers, experts_of_token] int16` each; None if not all
    have some.
    """
    found = [trajectory.experts for trajectory in trajectories]
    return None if None in found else [chosen for row in found if row is not None for chosen in row]


def lost_row(error: RelaxError) -> Dropped | Quarantined:
    """How a row ends whose data cannot be read: made again if it was lost, looked at if it was never good."""
    if isinstance(error, StoreError):
        return Dropped(DropReason.LOST_SEGMENT, str(error)[:2000])
    return Quarantined("trainer", 1, f"{type(error).__name__}: {error}"[:2000], "")
