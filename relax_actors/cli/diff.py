"""`relax diff`: the first step, row and cell at which two runs part."""

from __future__ import annotations

import json as json_module
import sys
from typing import Annotated, Any

import typer

from relax_actors.cli.options import AsJson

HELP = "Name or folder of a run."


def diff(
    a: Annotated[str, typer.Argument(help=HELP, metavar="RUN_A")],
    b: Annotated[str, typer.Argument(help=HELP, metavar="RUN_B")],
    json: AsJson = False,
) -> None:
    """Find the first step, row and cell at which two runs part, and what they differ in.

    The digests that batches and weights have are compared, so rows that are collected already count, too. Nothing of
    the runs is written. Exit code 0 if all steps that both runs have are equal, 1 if not, or if they have none in
    common.
    """
    from relax_actors.errors import ConfigError
    from relax_actors.monitoring.connection import find
    from relax_actors.replay.recording import opened
    from relax_actors.replay.runs import compare_runs

    if find(a).root.resolve() == find(b).root.resolve():
        msg = f"{a} and {b} are the same run; name two runs, such as a run and its branch"
        raise ConfigError(msg)
    with opened(a) as one, opened(b) as other:
        body = compare_runs(one, other)
    if json:
        sys.stdout.write(json_module.dumps(body) + "\n")
    else:
        _show(body)
    raise typer.Exit(0 if body["equal"] and body["steps"]["equal"] else 1)


def _show(body: dict[str, Any]) -> None:
    from relax_actors.counted import counted
    from relax_actors.monitoring.screen import Screen
    from relax_actors.printable import printable

    screen, steps = Screen(), body["steps"]
    both = f"A: {body['a']}, {counted(steps['a'], 'step')}; B: {body['b']}, {counted(steps['b'], 'step')}"
    screen.show(printable(both), "bold")
    for change in body["settings"]:
        screen.show(
            printable(
                f"  setting {change['key']}: {json_module.dumps(change['a'])} -> {json_module.dumps(change['b'])}"
            )
        )
    if not body["code"]["equal"]:
        screen.show(
            printable(f"  code of relax-actors: {body['code']['a'] or 'unknown'} -> {body['code']['b'] or 'unknown'}")
        )
    if body["equal"] and not steps["equal"]:
        screen.show("the runs have no step in common")
        return
    if body["equal"]:
        screen.show(f"both runs are equal in the {counted(steps['equal'], 'step')} that both have")
        return
    for name, value in body["difference"].items():
        screen.show(printable(f"first difference, {name}: {value}"))
    screen.show(f"equal before that: {counted(steps['equal'], 'step')}")
