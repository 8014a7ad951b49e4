"""What a data source is, and the settings that it is opened with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from relax_actors.data.task import Task
from relax_actors.errors import ConfigError


class DataSource(Protocol):
    """A fixed sequence of tasks, read from several threads.

    It is deterministic: item i is the same task each time and in every process, so that a restarted run admits the rows
    that it would have admitted.
    """

    def __len__(self) -> int:
        """Number of items, malformed items included."""

    def __getitem__(self, i: int, /) -> Task:
        """Item i, counted from 0.

        Raises:
            IndexError: i is negative or not below the length.
            RowError: this item is malformed; the others are not affected.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """Settings of a data source: the keys of [data] of the same names.

    A source of another package is a function of these settings that returns a `DataSource` and raises `ConfigError`.
    """

    path: Path | None = None
    task: str | None = None
    function: str | None = None
    size: int | None = None
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    media_bytes: int = 0
    """Most bytes of media in a row; 0 for a model of text alone, whose rows have none."""

    def required(self, name: str, kind: str) -> Any:
        """The value of a setting that a kind of source cannot do without.

        Raises:
            ConfigError: it is not set.
        """
        value = getattr(self, name)
        if value is None:
            msg = f"data.{name} is not set; data.kind = {kind!r} needs it"
            raise ConfigError(msg)
        return value
