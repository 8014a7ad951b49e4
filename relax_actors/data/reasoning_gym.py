"""Data source of reasoning-gym tasks, generated on demand."""

from __future__ import annotations

import difflib
from typing import Any

from relax_actors.data.fields import check_index, checked_prompt
from relax_actors.data.plain import plain
from relax_actors.data.source import SourceSettings
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError, RowError
from relax_actors.registry.dotted import import_extra


def open_reasoning_gym(settings: SourceSettings) -> ReasoningGym:
    """Open the procedural dataset `data.task`.

    Raises:
        ConfigError: reasoning-gym is not installed, has no such task, or the task refuses the options.
    """
    task = settings.required("task", "reasoning_gym")
    if settings.fields:
        msg = "data.fields has no effect on reasoning-gym, whose rows have no other fields; leave it out"
        raise ConfigError(msg)
    return ReasoningGym(task, settings.size, settings.seed, settings.options)


class ReasoningGym:
    """A procedural dataset; item i is generated from (seed, i).

    Metadata has `source_dataset`, `options` and `entry`, which the reward `reasoning_gym_score` needs. A few generators
    iterate over sets of strings (isomorphic_strings, knight_swap, polynomial_multiplication, ransom_note, word_ladder):
    their items are equal only in processes with the same PYTHONHASHSEED; actors have it set to 0.
    """

    def __init__(self, task: str, size: int | None, seed: int, options: dict[str, Any]) -> None:
        gym = import_extra("reasoning_gym", "tasks", "data.kind = 'reasoning_gym'")
        known = import_extra("reasoning_gym.factory", "tasks", "data.kind = 'reasoning_gym'").DATASETS
        if task not in known:
            close = difflib.get_close_matches(task, known)
            hint = f"did you mean {' or '.join(close)}?" if close else f"use one of {', '.join(sorted(known))}"
            msg = f"data.task = {task!r} is not a task of reasoning-gym; {hint}"
            raise ConfigError(msg)
        sized = {} if size is None else {"size": size}
        try:
            self._dataset = gym.create_dataset(task, seed=seed, **sized, **options)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            msg = f"data.options = {options!r}: task {task!r} refuses them ({cause}); correct them"
            raise ConfigError(msg) from error
        self._task, self._options = task, plain(options)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> Task:
        check_index(i, len(self))
        where = f"reasoning_gym {self._task} item {i + 1}"
        try:
            entry = plain(self._dataset[i])
        except Exception as error:
            msg = f"{where}: its generator raised {type(error).__name__}: {error}; change data.seed or data.options"
            raise RowError(msg) from error
        metadata = {"source_dataset": self._task, "options": self._options, "entry": entry}
        return Task(checked_prompt(entry["question"], where)[0], entry["answer"] or "", metadata, where)
