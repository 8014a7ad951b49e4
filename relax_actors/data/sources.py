"""Prompt sources: a fixed sequence of tasks out of a file, a generator or a user's function.

A source is deterministic: item i is the same task each time and in every process, so that a restarted run admits
the rows it would have admitted. It is read from several threads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from relax_actors.data.jsonl import JsonLines
from relax_actors.data.parquet import Parquet
from relax_actors.data.python import FunctionTasks
from relax_actors.data.reasoning_gym import ReasoningGym
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError, RowError

SourceKind = Literal["jsonl", "parquet", "reasoning_gym", "python"]
_LISTED = 3
T = TypeVar("T")


class PromptSource(Protocol):
    """A sequence of tasks."""

    def __len__(self) -> int:
        """Return how many items there are, bad ones included."""

    def __getitem__(self, i: int, /) -> Task:
        """Return item i, counted from 0.

        Raises:
            IndexError: i is negative or not below the length.
            RowError: this item is bad; the others are not touched by it.
        """


def open_source(
    kind: SourceKind,
    *,
    path: Path | None = None,
    task: str | None = None,
    function: str | None = None,
    size: int | None = None,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    prompt_field: str = "prompt",
    answer_field: str = "answer",
) -> PromptSource:
    """Open the source of section `data`.

    `size` bounds the rows of a file, is the number of tasks of `reasoning_gym` (None: the task's own default) and
    goes to the function of `python` as it is; `seed` and `options` go to the latter two.

    Raises:
        ConfigError: a setting is missing or wrong, a package is not installed, or not one row is good.
    """
    if size is not None and size < 1:
        msg = f"data.size = {size}: a source needs at least 1 task; leave it out to take all"
        raise ConfigError(msg)
    source: PromptSource
    match kind:
        case "jsonl" | "parquet":
            name, value = "path", str(_required(path, "path", kind))
            read = JsonLines if kind == "jsonl" else Parquet
            source = read(Path(value), size, prompt_field, answer_field)
        case "reasoning_gym":
            name, value = "task", _required(task, "task", kind)
            source = ReasoningGym(value, size, seed, options or {})
        case "python":
            name, value = "function", _required(function, "function", kind)
            source = FunctionTasks(value, size, seed, options or {})
        case _:
            msg = f"data.kind = {kind!r} is unknown; use jsonl, parquet, reasoning_gym or python"
            raise ConfigError(msg)
    _require_a_good_row(source, f"data.{name} = {value!r}")
    return source


def _required(value: T | None, name: str, kind: str) -> T:
    if value is None:
        msg = f"data.{name} is not set; data.kind = {kind!r} needs it"
        raise ConfigError(msg)
    return value


def _require_a_good_row(source: PromptSource, where: str) -> None:
    """Read up to the first good row: one bad row is quarantined later, nothing but bad rows is a wrong setting."""
    errors: list[str] = []
    for i in range(len(source)):
        try:
            source[i]
        except RowError as error:
            if len(errors) < _LISTED:
                errors.append(str(error))
        else:
            return
    more = f" (and {len(source) - len(errors)} more)" if len(source) > len(errors) else ""
    msg = f"{where}: not one of {len(source)} rows is good: {' | '.join(errors)}{more}"
    raise ConfigError(msg)
