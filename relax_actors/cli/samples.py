"""`relax samples`: prompts, completions and rewards of a run, by step."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from relax_actors.cli.options import Broker, Credentials, RunName
from relax_actors.printable import printable

if TYPE_CHECKING:
    from broker.subjects import RowId
    from relax_actors.monitoring.samples import SampleReader, ShownRow

LAST = 4
"""Rows that are shown if nothing else is asked for."""


def samples(
    run: RunName,
    step: Annotated[
        int | None, typer.Option(help="All rows of this step, and held-out rows of this version.", min=0)
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(help=f"The newest N rows. Default: {LAST}; of --step and --held-out all.", min=1, metavar="N"),
    ] = None,
    held_out: Annotated[
        int | None,
        typer.Option(help="All answers of this version to held-out prompts, from the run's folder.", min=0),
    ] = None,
    row: Annotated[
        int | None,
        typer.Option(help="Everything about this row of --step: tokens, turns, parts of the reward, authors.", min=0),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON a row.")] = False,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Show what the model said: prompts, completions and rewards.

    Reads the rows that the table still has, and those that the run's folder keeps (see [record]). All answers to
    held-out prompts are kept. Exit code 1 if there is nothing to show.
    """
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import observed
    from relax_actors.monitoring.samples import SampleReader

    if problem := _contradiction(step, held_out, row):
        from relax_actors.errors import ConfigError

        raise ConfigError(problem)
    if held_out is not None:
        rows = _kept(run, held_out)[-(last or 0) :]
        missing = "" if rows else f"version {held_out} of run {run} was evaluated on no row"
    else:
        with observed(run, Access(broker, credentials)) as at:
            reader = SampleReader(at, run)
            if step is not None and row is not None:
                _show_detail(reader, step, row, as_json=json)
                return
            rows = reader.rows(step, last or (LAST if step is None else 0))
            missing = "" if rows else _why_none(reader, at.run, step)
        for problem in reader.problems:
            sys.stderr.write(printable(f"relax: {problem}") + "\n")
    if missing:
        sys.stderr.write(f"relax: {missing}\n")
        raise typer.Exit(1)
    for each in rows:
        if json:
            sys.stdout.write(json_module.dumps({**asdict(each), "row": str(each.row)}) + "\n")
        else:
            show_row(each)


def _contradiction(step: int | None, held_out: int | None, row: int | None) -> str:
    """Return why options do not fit each other; empty if they do."""
    if row is not None and step is None:
        return "--row is the number of a row in its step; give --step, too"
    return "--step and --held-out show different rows; give one of them" if None not in (step, held_out) else ""


def _show_detail(reader: SampleReader, step: int, index: int, *, as_json: bool) -> None:
    """Print everything about a row."""
    from broker.subjects import RowId
    from relax_actors.cli.row_detail import show_detail

    row = RowId(step, index)
    detail = reader.detail(row)
    if detail is None:
        sys.stderr.write(f"relax: {_why_not(reader, row)}\n")
        raise typer.Exit(1)
    if as_json:
        sys.stdout.write(json_module.dumps(asdict(detail), default=str) + "\n")
    else:
        show_detail(detail)


def _why_not(reader: SampleReader, row: RowId) -> str:
    """Say why a row cannot be shown, and which rows of its step can."""
    kept = [] if reader.reader.record is None else reader.reader.record.rows(row.kind, row.step)
    if row.step >= reader.floor():
        return f"the table has no row {row}; `relax samples RUN --step {row.step}` shows the rows of the step"
    others = f"rows of the step that are kept: {', '.join(str(each.index) for each in kept)}" if kept else "no row is"
    return (
        f"row {row} is collected and was not kept; {others}. record.every = 1 keeps all rows of a run, within "
        "record.max_mib"
    )


def _kept(run: str, version: int) -> list[ShownRow]:
    from relax_actors.monitoring.connection import find
    from relax_actors.monitoring.kept_samples import kept_evaluation, shown_row

    return [shown_row(record) for record in kept_evaluation(find(run), version).records]


def _why_none(reader: SampleReader, run: str, step: int | None) -> str:
    floor, newest = reader.floor(), reader.newest()
    if newest is None and (step is None or step < floor):
        collected = f"the rows of all steps below {floor} are" if floor else "none is there yet, or all are"
        return (
            f"run {run} has no samples now: {collected} collected. Rows stay until the next checkpoint, and longer if "
            "[record] keeps them; a larger trainer.checkpoint_every keeps all of them longer"
        )
    if step is not None and step < floor:
        return (
            f"the rows of step {step} of run {run} are collected already, and [record] kept none of them; the table "
            f"has those of step {floor} and later. A larger trainer.checkpoint_every keeps them longer, and "
            "record.every = 1 keeps all"
        )
    there = "none has" if newest is None else f"the newest is step {newest}"
    return f"no row of step {step} of run {run} has samples yet; {there}"


def show_row(row: ShownRow) -> None:
    """Print a row: its prompt, and each sample with its reward."""
    from relax_actors.counted import counted
    from relax_actors.monitoring.screen import Screen
    from relax_actors.printable import printable, printable_lines

    def text(name: str, said: str) -> None:
        """Print a text: one line behind its name, or several below it."""
        if "\n" in said:
            screen.show(printable(f"  {name}:"))
            screen.show(printable_lines(said, "    "))
        else:
            screen.show(printable(f"  {name}: {said}"))

    screen, held_out = Screen(), "held-out, " if row.row.kind == "eval" else ""
    first, newest = row.versions or (None, None)
    versions = f"version {newest}" if first == newest else f"versions {first} to {newest}"
    by = "" if newest is None else f", sampled by {versions}"
    screen.show(printable(f"{row.row}: {held_out}step {row.row.step}{by}"), "bold")
    for role, said in row.messages:
        text(f"prompt, {role}", said)
    if not row.messages:
        text("prompt", row.prompt)
    for medium in row.media:
        text("medium", medium)
    if row.answer:
        text("expected answer", row.answer)
    if row.problem:
        text("no samples", row.problem)
    for i, sample in enumerate(row.samples):
        reward = "not scored yet" if sample.reward is None else f"reward {sample.reward:.4g}"
        facts = [reward, *([counted(sample.tokens, "token")] if sample.tokens is not None else [])]
        screen.show(printable(f"  sample {i}: {', '.join(filter(None, [*facts, sample.finish_reason]))}"))
        for role, said in sample.messages or [("completion", sample.text)]:
            screen.show(printable_lines(f"{role}: {said}" if sample.messages else said, "    "))
