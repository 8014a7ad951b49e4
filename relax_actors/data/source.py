"""What a data source is, and the settings that it is opened with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from relax_actors.data.task import Task
from relax_actors.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Ranges of a source to read together, such as the row groups of Parquet files.

    Attributes:
        sizes: rows of each range, in order `[blocks] int64`.
        held: number of ranges that the source keeps in memory; rows are shuffled within so many ranges.
    """

    sizes: NDArray[np.int64]
    held: int


class DataSource(Protocol):
    """A fixed sequence of tasks, read from several threads.

    It is deterministic: item i is the same task each time and in every process, so that a restarted run admits the rows
    that it would have admitted. A source whose items are not equally cheap to read in any order has an attribute
    `blocks` as well, a `Blocks`.
    """

    def __len__(self) -> int:
        """Number of items, malformed items included."""

    def __getitem__(self, i: int, /) -> Task:
        """Item i, counted from 0.

        Raises:
            IndexError: i is negative or not below the length.
            RowError: this item is malformed; the others are not affected.
        """


def blocks_of(source: DataSource) -> Blocks | None:
    """Return the ranges of a source; None if its items can be read in any order."""
    return getattr(source, "blocks", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """Settings of a data source: the keys of [data] of the same names.

    A source of another package is a function of these settings that returns a `DataSource` and raises `ConfigError`.
    `size` and `fields` are for it to apply; `rows` is applied to what it returns.
    """

    path: Path | None = None
    split: str | None = None
    task: str | None = None
    function: str | None = None
    size: int | None = None
    rows: str | None = None
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    mixture: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Kind and settings of each source of a mixture."""
    media_bytes: int = 0
    """Most bytes of media in a row; 0 for a model of text alone, whose rows have none."""

    def required(self, name: str, kind: str) -> Any:
        """The value of a required setting; raises ConfigError if it is not set."""
        value = getattr(self, name)
        if value is None:
            msg = f"data.{name} is not set; data.kind = {kind!r} needs it"
            raise ConfigError(msg)
        return value
