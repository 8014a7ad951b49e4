"""Rows of a step: read from the table, checked, and turned into the sequences that engines train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from broker.codec import Array
from broker.subjects import RowId
from broker.table import Table
from relax_actors.algorithms.step_statistics import StepNormalisation, normalise_step
from relax_actors.config import Config
from relax_actors.engines.protocols import TrainSample
from relax_actors.errors import ConfigError, RelaxError, StoreError
from relax_actors.messages import Advantage, Dropped, DropReason, Quarantined, Trajectory
from relax_actors.runtime.cells import read_column, read_logprobs
from relax_actors.training.samples import PROXIMAL, REFERENCE, samples_of, token_advantages
from relax_actors.training.validation import RowValidator

Columns = dict[str, Any]
"""What is read of a row by column; a `RelaxError` in place of what cannot be had."""
Lost = dict[int, Dropped | Quarantined]
"""How rows end that cannot be trained, by index."""


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
        """Tokens of each sequence of each row, those of the prompt included."""
        return [trajectory.sequence_lengths for trajectory in self.trajectories]

    @property
    def tokens(self) -> int:
        """Trained tokens of all rows."""
        return sum(int(np.count_nonzero(trajectory.trained)) for trajectory in self.trajectories)

    def samples(self) -> list[TrainSample]:
        """Sequences with trained tokens, row after row, as engines take them."""
        found: list[TrainSample] = []
        for i, (index, trajectory) in enumerate(zip(self.ids, self.trajectories, strict=True)):
            scores = {name: arrays[i] for name, arrays in self.scores.items()}
            found += samples_of(index, trajectory, self.advantages[i], scores, replays=self.replays)
        return found

    def normalised(self, kind: StepNormalisation) -> StepRows:
        """Copy whose advantages are normalised over all of its rows; see `normalise_step`."""
        if kind == "none":
            return self
        if all(len(a.values) == len(t.texts) for a, t in zip(self.advantages, self.trajectories, strict=True)):
            values = normalise_step([advantage.values for advantage in self.advantages], kind=kind)
        else:
            masks = [trajectory.trained for trajectory in self.trajectories]
            values = [token_advantages(a, t) for a, t in zip(self.advantages, self.trajectories, strict=True)]
            trained = normalise_step([v[mask] for v, mask in zip(values, masks, strict=True)], kind=kind)
            values = [v.copy() for v in values]
            for row, mask, new in zip(values, masks, trained, strict=True):
                row[mask] = new
        advantages = [replace(a, values=v) for a, v in zip(self.advantages, values, strict=True)]
        return replace(self, advantages=advantages)

    @property
    def oldest(self) -> int:
        """The oldest version that wrote a token."""
        return min(self.oldest_of_rows)

    @property
    def oldest_of_rows(self) -> list[int]:
        """Oldest version that sampled a trained token of each row."""
        return [trajectory.oldest_version for trajectory in self.trajectories]

    @property
    def span(self) -> int:
        """Versions that wrote one trajectory, at most; more than 1 only where weights change in mid-generation."""
        return max(len(np.unique(t.versions[t.versions >= 0])) for t in self.trajectories)

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
        self._table, self._staleness, self._validator = table, config.staleness, RowValidator(config)
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
        if why := self._validator.of_row(trajectory, columns["advantage"], step):
            return Quarantined("trainer", 1, why, "")
        staleness = step - trajectory.oldest_version
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


def lost_row(error: RelaxError) -> Dropped | Quarantined:
    """How a row ends whose data cannot be read: made again if it was lost, looked at if it was never good."""
    if isinstance(error, StoreError):
        return Dropped(DropReason.LOST_SEGMENT, str(error)[:2000])
    return Quarantined("trainer", 1, f"{type(error).__name__}: {error}"[:2000], "")
