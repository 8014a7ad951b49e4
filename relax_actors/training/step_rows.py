"""Rows of a step: read from the table, checked, and converted to samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from broker.codec import Array
from broker.subjects import RowId
from relax_actors.config import Config
from relax_actors.engines.protocols import PromptMedia, TrainSample
from relax_actors.engines.protocols.media import placeholders_of
from relax_actors.errors import ConfigError, RelaxError
from relax_actors.messages import Advantage, Dropped, DropReason, Quarantined, TeacherScores, Trajectory
from relax_actors.runtime.cells import read_column, read_logprobs
from relax_actors.runtime.context import Context
from relax_actors.training.row_digests import DIGESTS, digests_of
from relax_actors.training.row_endings import ending_of_unreadable
from relax_actors.training.row_media import MEDIA, RowMedia
from relax_actors.training.samples import (
    PROXIMAL,
    REFERENCE,
    TEACHER,
    VALUES,
    AuxiliaryTerms,
    computed_lengths,
    has_pair,
    in_layout,
    only_pair,
    samples_of,
    sign_of_samples,
    without_truncated,
)
from relax_actors.training.validation import RowValidator, mismatched_version

T = TypeVar("T")
Columns = dict[str, Any]
"""Values of a row by column; a `RelaxError` in place of a value that cannot be read."""
UnusableRows = dict[int, Dropped | Quarantined]
"""Rows that cannot be trained, by index, and the cell that ends each."""


@dataclass(slots=True)
class StepRows:
    """Rows of a step, in the order in which they are trained.

    Attributes:
        ids: indices of the rows within the step.
        trajectories: samples of each row.
        advantages: advantages of each row.
        scores: log-probs and values of each row, `[total] float32`, and `TeacherScores`, by column.
        media: media of the sequences of each row; empty for a model that reads text only.
        replays: whether engines compute with the recorded experts.
        share_prefixes: whether engines compute a prompt once for all of its sequences.
        only_pairs: whether only the best and the worst sample of a row are trained.
        terms: what samples train beside their advantages.
        digests: digest of each row's cell by column, see `row_digests`.
    """

    ids: list[int]
    trajectories: list[Trajectory]
    advantages: list[Advantage]
    scores: dict[str, list[Any]] = field(default_factory=dict)
    media: list[list[PromptMedia]] = field(default_factory=list)
    replays: bool = False
    share_prefixes: bool = False
    only_pairs: bool = False
    terms: AuxiliaryTerms = field(default_factory=AuxiliaryTerms)
    digests: dict[str, list[int]] = field(default_factory=dict)

    def add(self, index: int, columns: Columns) -> None:
        """Append a row."""
        self.ids.append(index)
        trajectory = columns["trajectory"]
        self.trajectories.append(only_pair(trajectory, columns["advantage"]) if self.only_pairs else trajectory)
        self.advantages.append(columns["advantage"])
        for name, arrays in self.scores.items():
            arrays.append(columns[name])
        if MEDIA in columns:
            self.media.append(columns[MEDIA])
        for name, digest in columns.get(DIGESTS, {}).items():
            self.digests.setdefault(name, []).append(digest)

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, more: StepRows) -> None:
        """Append the rows of `more`."""
        self.ids += more.ids
        self.trajectories += more.trajectories
        self.advantages += more.advantages
        for name, arrays in more.scores.items():
            self.scores.setdefault(name, []).extend(arrays)
        self.media += more.media
        for name, digests in more.digests.items():
            self.digests.setdefault(name, []).extend(digests)

    def part(self, rows: Sequence[int]) -> StepRows:
        """Return a copy with the rows at these positions."""

        def at(items: list[T]) -> list[T]:
            return [items[row] for row in rows]

        scores = {name: at(arrays) for name, arrays in self.scores.items()}
        ids, trajectories, advantages = at(self.ids), at(self.trajectories), at(self.advantages)
        media, digests = at(self.media) if self.media else [], {name: at(own) for name, own in self.digests.items()}
        columns: dict[str, Any] = {"ids": ids, "trajectories": trajectories, "advantages": advantages}
        return replace(self, **columns, scores=scores, media=media, digests=digests)

    def with_proximal(self, scored: Iterator[Array]) -> StepRows:
        """Return a copy with proximal log-probs, `[len] float32` of each trained sequence."""
        proximal = [in_layout(trajectory, scored) for trajectory in self.trajectories]
        return replace(self, scores=self.scores | {PROXIMAL: proximal})

    @property
    def lengths(self) -> list[list[int]]:
        """Computed tokens of each sequence of each row, and of its media for the towers."""
        lengths = [computed_lengths(t, share_prefixes=self.share_prefixes) for t in self.trajectories]
        if not self.media:
            return lengths
        return [[*row, placeholders_of(media)] for row, media in zip(lengths, self.media, strict=True)]

    @property
    def tokens(self) -> int:
        """Number of trained tokens of all rows."""
        return sum(int(np.count_nonzero(trajectory.trained)) for trajectory in self.trajectories)

    def samples(self) -> list[TrainSample]:
        """Return one `TrainSample` for each sequence with trained tokens, in the order of the rows."""
        samples: list[TrainSample] = []
        for i, (index, trajectory) in enumerate(zip(self.ids, self.trajectories, strict=True)):
            scores = {name: arrays[i] for name, arrays in self.scores.items()}
            advantage, media = self.advantages[i], self.media[i] if self.media else None
            samples += samples_of(
                index, trajectory, advantage, scores, replays=self.replays, terms=self.terms, media=media
            )
        return samples

    @property
    def reward_components(self) -> dict[str, float]:
        """Mean of each reward component over the rows that have it."""
        names = sorted({name for advantage in self.advantages for name in advantage.components})
        return {n: float(np.mean([a.components[n] for a in self.advantages if n in a.components])) for n in names}

    @property
    def teacher_gap(self) -> float | None:
        """Mean of rollout - teacher log-prob over the trained tokens; None without a teacher.

        It estimates KL(rollout || teacher).
        """
        scores: list[TeacherScores] = self.scores.get(TEACHER, [])
        gaps = [
            (trajectory.logprobs - teacher.logprobs)[trajectory.trained].astype(np.float64)
            for trajectory, teacher in zip(self.trajectories, scores, strict=bool(scores))
        ]
        return float(np.concatenate(gaps).mean()) if scores else None

    @property
    def reward_kl(self) -> float | None:
        """Mean KL of a sample within rewards, before its coefficient; None without one."""
        kls = [advantage.kl for advantage in self.advantages if advantage.kl is not None]
        return float(np.mean(kls)) if kls else None

    def staleness(self, step: int) -> list[int]:
        """Return the staleness of each row in a step; see `Trajectory.staleness`."""
        return [trajectory.staleness(step) for trajectory in self.trajectories]

    @property
    def span(self) -> int:
        """Largest number of versions in one trajectory; above 1 only with in-flight updates."""
        return max(len(np.unique(t.versions[t.versions >= 0])) for t in self.trajectories)


def last_column(config: Config) -> str:
    """Return the column that makes a row ready: advantage, or trajectory for data."""
    return "trajectory" if config.from_data else "advantage"


def columns_to_train(config: Config) -> tuple[str, ...]:
    """Return the columns that a step needs besides trajectories and advantages."""
    needed = {
        PROXIMAL: config.algorithm.proximal == PROXIMAL,
        REFERENCE: config.algorithm.loss_reads_reference and not config.computes_reference,
        TEACHER: config.algorithm.distil.place != "none",
        VALUES: config.critic is not None,
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)


class StepReader:
    """Reads and checks the rows of a step.

    Args:
        context: context of the trainer or critic.
        published: fingerprints of the published weights by version; the caller adds later ones.

    Attributes:
        columns: columns of log-probs and values that the algorithm reads.
    """

    def __init__(self, context: Context, published: Mapping[int, str]) -> None:
        table, config = context.table, context.config
        self._published = published
        self._media = None if config.media is None else RowMedia(context)
        self._table, self._staleness, self._validator = table, config.staleness, RowValidator(config)
        self._replays, self._share_prefixes = config.trainer.router_replay, config.trainer.shares_prefixes
        self._masks_truncated = config.algorithm.shaping.mask_truncated
        distil = config.algorithm.distil
        self._terms = AuxiliaryTerms(distil if distil.place != "none" else None)
        self._top_k = distil.top_k or 0
        self._from_data, self._only_pairs = config.from_data, config.algorithm.trains_sampled_pairs
        self.columns = columns_to_train(config)

    def empty(self) -> StepRows:
        """Return a `StepRows` without rows."""
        scores: dict[str, list[Any]] = {name: [] for name in self.columns}
        settings: dict[str, Any] = {"replays": self._replays, "share_prefixes": self._share_prefixes}
        return StepRows([], [], [], scores, terms=self._terms, only_pairs=self._only_pairs, **settings)

    def read(self, step: int, indices: Sequence[int]) -> tuple[StepRows, UnusableRows]:
        """Read rows; return the rows that can be trained and the rows that cannot."""
        rows, unusable = self.empty(), {}
        for index, columns in zip(indices, self._columns(step, indices), strict=True):
            ending = self._ending(columns, RowId(step, index))
            if ending is None:
                rows.add(index, columns)
            else:
                unusable[index] = ending
        return rows, unusable

    def read_again(self, step: int, indices: Sequence[int]) -> StepRows:
        """Read a trained step's rows, without staleness; raises ConfigError if one is lost."""
        rows = self.empty()
        for index, columns in zip(indices, self._columns(step, indices), strict=True):
            if error := next((c for c in columns.values() if isinstance(c, RelaxError)), None):
                msg = f"step {step} cannot be replayed: row {index} is lost ({error}); restore the store's folder"
                raise ConfigError(msg)
            rows.add(index, columns)
        return rows

    def _ending(self, columns: Columns, row: RowId) -> Dropped | Quarantined | None:
        """Return the cell that ends a row which cannot be trained; None if it can be trained."""
        if error := next((c for c in columns.values() if isinstance(c, RelaxError)), None):
            return ending_of_unreadable("trainer", error)
        trajectory: Trajectory = columns["trajectory"]
        if why := self._validator.of_row(trajectory, columns["advantage"], row.step):
            return Quarantined("trainer", 1, why, "")
        if TEACHER in columns and (why := self._validator.of_teacher(columns[TEACHER], trajectory, self._top_k)):
            return Quarantined("trainer", 1, why, "")
        if (version := mismatched_version(trajectory, self._published)) is not None:
            return Quarantined("trainer", 1, self._mismatch(row, trajectory, version), "")
        return self._dropped(trajectory, columns["advantage"], row.step)

    def _dropped(self, trajectory: Trajectory, advantage: Advantage, step: int) -> Dropped | None:
        """Return why a row in order is not trained; None if it is."""
        if self._only_pairs and not has_pair(trajectory, advantage):
            # Its samples would count in the means of the step, and its sums of 0 among those of the pairs.
            why = "its samples make no pair: equal rewards, or an answer of the pair has no trained tokens"
            return Dropped(DropReason.NO_SIGNAL, why)
        staleness = trajectory.staleness(step)
        if staleness > self._staleness.max and self._staleness.policy == "drop":
            return Dropped(DropReason.TOO_OLD, f"staleness {staleness} is over staleness.max")
        return None

    def _mismatch(self, row: RowId, trajectory: Trajectory, version: int) -> str:
        cell = self._table.get(self._table.subject(row, "trajectory"))
        author = "an unknown actor" if cell is None else self._table.read_envelope(cell.data).author
        claimed, published = trajectory.fingerprint_by_version[version], self._published[version]
        return (
            f"the trajectory of {row}, written by {author}, has tokens of version {version} sampled with weights of "
            f"fingerprint {claimed[:64]}, but weights {version} were published with {published}; the actor holds "
            "weights of another run or trainer. Restart it (its process, or `relax up` again), and requeue the row"
        )

    def _columns(self, step: int, indices: Sequence[int]) -> list[Columns]:
        """Read the columns of each row."""
        rows = [RowId(step, index) for index in indices]
        rows_read = self._samples(rows)
        digests = [digests_of(columns, from_data=self._from_data) for columns in rows_read]
        if self._masks_truncated:
            for columns in rows_read:
                if isinstance(trajectory := columns["trajectory"], Trajectory):
                    columns["trajectory"] = without_truncated(trajectory)
        trajectories = [columns["trajectory"] for columns in rows_read]
        if self._media is not None:
            readable = [t if isinstance(t, Trajectory) else None for t in trajectories]
            for columns, media in zip(rows_read, self._media.read(rows, readable), strict=True):
                columns[MEDIA] = media
        for name in self.columns:
            values: list[Any] = (
                read_column(self._table, rows, name, TeacherScores)
                if name == TEACHER
                else read_logprobs(self._table, rows, name, trajectories)
            )
            for columns, value, known in zip(rows_read, values, digests, strict=True):
                columns[name] = value
                known.update(digests_of({name: value}))
        for columns, known in zip(rows_read, digests, strict=True):
            columns[DIGESTS] = known
        return rows_read

    def _samples(self, rows: Sequence[RowId]) -> list[Columns]:
        """Read the samples of each row, and their advantages, which rows from the data do not have."""
        columns_of: list[Columns] = [
            {"trajectory": value} for value in read_column(self._table, rows, "trajectory", Trajectory)
        ]
        advantages: Iterable[Any] = map(sign_of_samples, (columns["trajectory"] for columns in columns_of))
        if not self._from_data:
            advantages = read_column(self._table, rows, "advantage", Advantage)
        for columns, value in zip(columns_of, advantages, strict=True):
            columns["advantage"] = value
        return columns_of
