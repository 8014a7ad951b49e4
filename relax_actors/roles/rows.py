"""The rows of a step as the trainer needs them, and how they are read from the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from broker.codec import Array
from broker.errors import CodecError, RelaxError, StoreError
from broker.subjects import RowId
from broker.table import Table
from relax_actors.config import Config
from relax_actors.engines.training import Sequences, TrainBatch
from relax_actors.errors import ConfigError
from relax_actors.messages import Advantage, DropReason, Trajectory
from relax_actors.roles.reading import read_logprobs

PROXIMAL, REFERENCE = "actor_fwd", "reference"
"""Columns of log-probs, `[total] float32`: the proximal policy's, where algorithm.proximal asks for it, and the KL's
reference, where actors compute it."""

Lost = list[tuple[int, DropReason, str]]
"""Rows that cannot be trained: index, why, and the details."""


@dataclass(slots=True)
class StepRows:
    """The rows of a step."""

    ids: list[int]
    trajectories: list[Trajectory]
    advantages: list[Advantage]
    scores: dict[str, list[Array]] = field(default_factory=dict)
    """Columns of log-probs, each `[total] float32` a row."""

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
            Sequences(prompts, completions),
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
        return min(int(t.versions.min()) for t in self.trajectories if len(t.versions))

    @property
    def newest(self) -> int:
        """The newest version that wrote a token."""
        return max(int(t.versions.max()) for t in self.trajectories if len(t.versions))

    def older_than(self, step: int, most: int) -> int:
        """Rows with a token that is more than `most` versions older than `step`."""
        return sum(step - int(t.versions.min()) > most for t in self.trajectories if len(t.versions))


class StepReader:
    """Reads the rows of a step.

    Args:
        table: the run's.
        config: the run's.
    """

    def __init__(self, table: Table, config: Config) -> None:
        self._table, self._staleness = table, config.staleness
        wanted = {
            PROXIMAL: config.algorithm.proximal == PROXIMAL,
            REFERENCE: config.algorithm.kl_coefficient > 0 and not config.computes_reference,
        }
        self.columns = tuple(name for name, wants in wanted.items() if wants)

    def read(self, step: int, indices: Sequence[int], ready: Mapping[int, bytes]) -> tuple[StepRows, Lost]:
        """The rows that can be trained, and those that cannot.

        Args:
            step: the step.
            indices: its rows.
            ready: their advantages, by index.
        """
        lost: Lost = []
        rows = StepRows([], [], [])
        for index, trajectory in zip(indices, self._trajectories(step, indices), strict=True):
            if isinstance(trajectory, RelaxError):
                lost.append((index, DropReason.LOST_SEGMENT, str(trajectory)))
                continue
            advantage = self._table.read(ready[index], Advantage)
            if len(advantage.values) != len(trajectory.lengths) or not len(trajectory.tokens):
                detail = f"{len(advantage.values)} advantages for {len(trajectory.lengths)} samples"
                lost.append((index, DropReason.UNUSABLE, f"{detail} of {len(trajectory.tokens)} tokens"))
                continue
            age = step - int(trajectory.versions.min())
            if age > self._staleness.max and self._staleness.policy == "drop":
                lost.append((index, DropReason.TOO_OLD, f"age {age} is over staleness.max"))
                continue
            rows.ids.append(index)
            rows.trajectories.append(trajectory)
            rows.advantages.append(advantage)
        bad = self._add_columns(step, rows)
        return rows, lost + [(index, DropReason.UNUSABLE, detail) for index, detail in bad]

    def read_again(self, step: int, indices: Sequence[int]) -> StepRows:
        """The rows of a step that was trained before.

        Raises:
            ConfigError: one is lost.
        """
        table = self._table
        cells = table.get_all(table.cell(RowId(step, i), "advantage") for i in indices)
        rows = StepRows(list(indices), [], [])
        for index, cell, trajectory in zip(indices, cells, self._trajectories(step, indices), strict=True):
            if isinstance(trajectory, RelaxError) or cell is None:
                msg = f"step {step} cannot be replayed: row {index} is lost ({trajectory}); restore the store's folder"
                raise ConfigError(msg)
            rows.trajectories.append(trajectory)
            rows.advantages.append(table.read(cell.data, Advantage))
        if bad := self._add_columns(step, rows):
            msg = f"step {step} cannot be replayed: row {bad[0][0]}: {bad[0][1]}; restore the store's folder"
            raise ConfigError(msg)
        return rows

    def _add_columns(self, step: int, rows: StepRows) -> list[tuple[int, str]]:
        """Read the columns of log-probs; gives the rows, and why, that have none that can be used."""
        bad: dict[int, str] = {}
        for column in self.columns:
            rows.scores[column], unusable = read_logprobs(self._table, column, step, rows.ids, rows.trajectories)
            bad |= dict(unusable)
        return list(bad.items())

    def _trajectories(self, step: int, indices: Sequence[int]) -> list[Trajectory | RelaxError]:
        table = self._table
        cells = table.get_all(table.cell(RowId(step, i), "trajectory") for i in indices)
        found: list[Trajectory | RelaxError] = []
        for index, cell in zip(indices, cells, strict=True):
            try:
                if cell is None:
                    msg = f"cell group.{step}.{index}.trajectory is gone"
                    raise StoreError(msg)  # noqa: TRY301 one way for all that is lost
                found.append(table.read(cell.data, Trajectory))
            except (StoreError, CodecError) as error:
                found.append(error)
        return found
