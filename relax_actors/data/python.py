"""Data source of tasks that a function of the user returns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from relax_actors.data.field_names import FieldNames
from relax_actors.data.fields import RowFields, check_index, checked_prompt, task_of
from relax_actors.data.plain import plain
from relax_actors.data.source import SourceSettings
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError, RowError
from relax_actors.registry.dotted import load


class FunctionTasks:
    """The tasks that `function(size=size, seed=seed, **options)` returns.

    The function is called once, when the source is opened; each item is checked when it is used.

    Raises:
        ConfigError: it does not import, raises, or does not return a sequence of tasks.
    """

    def __init__(self, settings: SourceSettings) -> None:
        function = settings.required("function", "python")
        where = f"data.function = {function!r}"
        make = load(function, "data.function")
        if not callable(make):
            msg = f"{where} is a {type(make).__name__}; name a function that returns a sequence of tasks"
            raise ConfigError(msg)
        try:
            items = make(size=settings.size, seed=settings.seed, **settings.options)
        except Exception as error:
            msg = (
                f"{where}: calling it with size, seed and data.options raised {type(error).__name__}: {error}; "
                f"fix the function or data.options"
            )
            raise ConfigError(msg) from error
        unfit = isinstance(items, str | bytes | Mapping) or not hasattr(items, "__getitem__")
        if unfit or not hasattr(items, "__len__"):
            msg = f"{where} returned a {type(items).__name__}; return a sequence of Task or (prompt, answer)"
            raise ConfigError(msg)
        if len(items) == 0:
            msg = f"{where} returned no tasks; return at least one"
            raise ConfigError(msg)
        self._function, self._items = function, items
        self._fields = RowFields(FieldNames(settings.fields), Path(), settings.media_bytes)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, i: int) -> Task:
        check_index(i, len(self))
        where = f"{self._function} item {i + 1}"
        match self._items[i]:
            case Task(prompt, str(answer), dict(metadata), media=tuple(media)):
                checked, own = checked_prompt(prompt, where)
                return Task(checked, plain(answer), plain(metadata), where, (*media, *own))
            case (prompt, str(answer)):
                checked, own = checked_prompt(prompt, where)
                return Task(checked, plain(answer), {}, where, own)
            case dict(row):
                return task_of(row, where, self._fields)
            case other:
                msg = (
                    f"{where}: {other!r:.200} is neither a Task, a (prompt, answer) with a text as the answer, nor an "
                    "object with fields"
                )
                raise RowError(msg)
