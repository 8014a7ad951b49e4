"""Tables of evaluations on the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rich.table import Table

from relax_actors.cli.command_lines import relative
from relax_actors.cli.samples import show_row
from relax_actors.counted import counted
from relax_actors.evaluation.figures import Figure, Figures, figures_of
from relax_actors.evaluation.records import Evaluated
from relax_actors.monitoring.kept_samples import shown_row
from relax_actors.monitoring.screen import Screen
from relax_actors.printable import printable
from relax_actors.runtime.run_folder import RunFolder

ANSWERS = 4
"""Answers to a prompt that are shown."""


@dataclass(frozen=True)
class Result:
    """An evaluation of a model: the model's name, the folder, and the answers."""

    name: str
    folder: RunFolder
    evaluated: Evaluated

    @cached_property
    def figures(self) -> dict[str, Figures]:
        """Figures of each set."""
        return figures_of(self.evaluated)

    def json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "model": self.name,
            "run": self.evaluated.run,
            "fingerprint": self.evaluated.fingerprint,
            "answers": str(self.folder.evaluation(self.evaluated.version)),
            "sets": {name: figures.json() for name, figures in self.figures.items()},
        }


def show_evaluations(console: Screen, results: Sequence[Result], samples: int) -> None:
    """Show figures of each model, set and category, and the first answers."""
    if len(results) > 1:
        console.print(_chain(results))
    else:
        _show_one(console, results[0], samples)
    for result in results:
        failed = sum(figures.failed for figures in result.figures.values())
        left = f"; {counted(failed, 'row')} failed and count in no figure" if failed else ""
        path = relative(result.folder.evaluation(result.evaluated.version))
        console.show(printable(f"{result.name}: all answers are in {path}{left}"))


def _show_one(console: Screen, result: Result, samples: int) -> None:
    table = Table("set", "rows", "figure", "value", "95 % interval", title=printable(f"held-out sets: {result.name}"))
    for name, figures in result.figures.items():
        labels = [printable(name), str(figures.rows)]
        for figure, value in _named(figures):
            table.add_row(*labels, figure, *_cells(value))
            labels = ["", ""]
        if not figures.rows:
            table.add_row(*labels, "all rows failed", "", "")
    console.print(table)
    for name, figures in result.figures.items():
        if figures.categories:
            console.print(_by_category(name, str(result.evaluated.sets[name].category), figures))
        own = [record for record in result.evaluated.records if record.set == name]
        for record in own[:samples]:
            show_row(shown_row(replace(record, answers=record.answers[:ANSWERS])))


def _named(figures: Figures) -> Iterator[tuple[str, Figure | None]]:
    """Yield the figures of a set by name; majority@1 is pass@1."""
    yield "mean reward", figures.reward
    yield from ((f"pass@{k}", figure) for k, figure in figures.pass_at.items())
    yield from ((f"majority@{k}", figure) for k, figure in figures.majority_at.items() if k > 1)


def _by_category(name: str, field: str, figures: Figures) -> Table:
    title = printable(f"{name} by {field}")
    table = Table(printable(field), "rows", "mean reward", "95 % interval", "pass@1", "95 % interval", title=title)
    for category, own in figures.categories.items():
        table.add_row(printable(category), str(own.rows), *_cells(own.reward), *_cells(own.accuracy))
    return table


def _chain(results: Sequence[Result]) -> Table:
    """Return the table of the models of a chain: how each scores on the same sets."""
    columns = ("model", "set", "rows", "mean reward", "95 % interval", "pass@1", "95 % interval")
    table = Table(*columns, title="held-out sets by stage")
    for result in results:
        for name, figures in result.figures.items():
            cells = (*_cells(figures.reward), *_cells(figures.accuracy))
            table.add_row(printable(result.name), printable(name), str(figures.rows), *cells)
    return table


def print_json(results: Sequence[Result], *, is_chain: bool) -> None:
    """Print the result as a line of JSON; of a chain, each model's mean reward."""
    body: Any = results[0].json()
    if is_chain:
        scores = {r.name: {name: _score(own) for name, own in r.figures.items()} for r in results}
        body = {name: next(iter(own.values())) if len(own) == 1 else own for name, own in scores.items()}
    sys.stdout.write(json.dumps(body) + "\n")
    sys.stdout.flush()


def _score(figures: Figures) -> float | None:
    return None if figures.reward is None else round(figures.reward.value, 4)


def _cells(figure: Figure | None) -> tuple[str, str]:
    if figure is None:
        return "", ""
    interval = "" if figure.interval is None else "{:.3f} to {:.3f}".format(*figure.interval)
    return f"{figure.value:.3f}", interval
