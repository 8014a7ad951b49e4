"""Check of a set of held-out rows: that it has the rows, answers and categories that its figures need."""

from __future__ import annotations

from collections.abc import Iterator

from relax_actors.config.evaluation import EvalSet
from relax_actors.data.check import SAMPLED_ROWS
from relax_actors.data.checked_run import CheckedRun
from relax_actors.data.mixture import first_items
from relax_actors.data.prompt_maker import open_data
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError, RowError
from relax_actors.registry.catalog import REWARDS


def check_set(run: CheckedRun, held_out: EvalSet, where: str) -> Iterator[str]:
    """Check a set of held-out rows.

    Raises:
        ConfigError: its reward compares with the answer, and rows have none; or no row has its category.
    """
    source = open_data(held_out.source, run.config.media)
    tasks = []
    for i in first_items(source, min(held_out.rows, SAMPLED_ROWS)):
        try:
            tasks.append(source[i])
        except RowError:  # the check of the data says why
            continue
    names = [held_out.reward] if isinstance(held_out.reward, str) else list(held_out.reward)
    if not run.config.from_data and (comparing := next(filter(_compares, names), None)) is not None:
        _check_answers(tasks, comparing, f"{where}.data")
    if held_out.category is not None:
        lacking = [task for task in tasks if held_out.category not in task.metadata]
        if tasks and len(lacking) == len(tasks):
            known = ", ".join(sorted(tasks[0].metadata)) or "none"
            msg = f"{where}.data: no row has the field {held_out.category!r}, which `category` names; fields: {known}"
            raise ConfigError(msg)
        if lacking:
            yield f"{where}.data: {len(lacking)} of the first {len(tasks)} rows have no {held_out.category!r}"
    if held_out.rows > len(source):
        count = len(source)
        yield f"{where}.rows = {held_out.rows}, but {where}.data has {count} rows: {count} are evaluated"


def _compares(name: str) -> bool:
    """Whether a reward function is built in and compares with the answer of the row."""
    return name in REWARDS.built_in and getattr(REWARDS.load(name, ""), "compares", False)


def _check_answers(tasks: list[Task], reward: str, where: str) -> None:
    lacking = [task for task in tasks if not task.answer.strip()]
    if lacking:
        msg = (
            f"{where}: {len(lacking)} of the first {len(tasks)} rows have no answer, which reward {reward!r} compares "
            f"with; the first: {lacking[0].origin or 'a task'}. Name the field with the answer in {where}.fields, "
            "remove the rows, or choose another reward"
        )
        raise ConfigError(msg)
