"""`relax compare`: the difference of two evaluations, paired by prompt."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_actors.cli.options import AsJson
from relax_actors.counted import counted
from relax_actors.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

    from relax_actors.evaluation.comparison import Comparison
    from relax_actors.evaluation.records import Evaluated

HELP = "Name or folder of a run or an evaluation; RUN@VERSION for another version than the newest evaluated one."


def compare(
    a: Annotated[str, typer.Argument(help=HELP, metavar="RUN_A")],
    b: Annotated[str, typer.Argument(help=HELP, metavar="RUN_B")],
    json: AsJson = False,
) -> None:
    """Compare the answers of two evaluations to the same held-out prompts.

    Shows the difference B - A of each set and category with an interval of 95 %, by a bootstrap of the prompts, and
    McNemar's test where each prompt has one answer, or one pair of answers, that passes or fails.
    """
    from relax_actors.evaluation.comparison import compare as compared

    first, second = _evaluated(a), _evaluated(b)
    comparisons = compared(first, second)
    if json:
        body = {"a": a, "b": b, "sets": {name: each.json() for name, each in comparisons.items()}}
        sys.stdout.write(json_module.dumps(body) + "\n")
        return
    _show(first, second, comparisons)


def _evaluated(given: str) -> Evaluated:
    from relax_actors.errors import ConfigError
    from relax_actors.monitoring.connection import find
    from relax_actors.monitoring.kept_samples import kept_evaluation

    run, at, version = given.rpartition("@")
    if not at or "/" in version:  # an @ in the name of a folder
        return kept_evaluation(find(given))
    if not (version.isascii() and version.isdigit()):
        if Path(given).is_dir():
            return kept_evaluation(find(given))
        msg = f"{given!r}: {version!r} is no version; write RUN@VERSION, such as demo@100"
        raise ConfigError(msg)
    return kept_evaluation(find(run), int(version))


def _show(first: Evaluated, second: Evaluated, comparisons: dict[str, Comparison]) -> None:
    from rich.table import Table

    from relax_actors.monitoring.screen import Screen

    title = f"A: {first.run}, version {first.version}; B: {second.run}, version {second.version}"
    table = Table("set", "prompts", "figure", "A", "B", "B - A", "95 % interval", title=printable(title))
    for name, each in comparisons.items():
        _add(table, name, each)
        for category, part in each.categories.items():
            _add(table, f"  {category}", part)
    console = Screen()
    console.print(table)
    for name, each in comparisons.items():
        if each.changed is not None:
            better, worse = each.changed
            console.show(
                printable(
                    f"{name}: only B passes {counted(better, 'prompt')}, only A passes {worse}; McNemar's test: "
                    f"p = {each.p:.3g}"
                )
            )


def _add(table: Table, name: str, each: Comparison) -> None:
    labels = [printable(name), str(each.prompts)]
    for figure, own in (("mean reward", each.reward), ("accuracy", each.accuracy)):
        if own is not None:
            interval = "" if own.interval is None else "{:+.3f} to {:+.3f}".format(*own.interval)
            numbers = (f"{own.first:.3f}", f"{own.second:.3f}", f"{own.value:+.3f}", interval)
            table.add_row(*labels, figure, *numbers)
            labels = ["", ""]
